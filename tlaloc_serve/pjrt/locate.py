"""Where a plugin may be. Files only: nothing is imported and nothing is opened.

Rules. A plugin that the user names is the only candidate: `--plugin` for every platform, the environment variable
for a platform it can be for (a tpu plugin for tpu, any other for the others). Otherwise every root is looked at, in
one order for all platforms, and each place is recorded with what was there, so that a search that finds nothing can
say where it looked.
"""

from __future__ import annotations

import os
import pathlib
import re
import site
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tlaloc_serve.errors import RequestError
from tlaloc_serve.pjrt.cache import cache_folder, home
from tlaloc_serve.pjrt.platforms import kind_of

PLUGIN_PATH = "TLALOC_PJRT_PLUGIN_PATH"
FETCH_CPU = "python3 -m tlaloc_serve plugins --fetch cpu"

# Below a folder of Python packages: what each platform's packages put there, the one to prefer first.
PATTERNS: dict[str, tuple[str, ...]] = {
    "cuda": ("jax_plugins/*cuda*/*.so",),
    "rocm": ("jax_plugins/*rocm*/*.so",),
    "tpu": ("libtpu/libtpu.so",),
    "cpu": (
        "lammps_jax_pjrt_cpu/pjrt_c_api_cpu_plugin.so",
        "fastatomstruct_xla_cpu/libpjrt_cpu.so",
        "xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so",
    ),
}
SYSTEM_ROOTS = (pathlib.Path("/usr/local"), pathlib.Path("/usr"))
SYSTEM_LIBTPU = (
    pathlib.Path("/lib/libtpu.so"),
    pathlib.Path("/usr/lib/libtpu.so"),
    pathlib.Path("/usr/local/lib/libtpu.so"),
)
_PACKAGES = "lib{,64}/python3.*/{site,dist}-packages"


@dataclass(frozen=True)
class Candidate:
    """A plugin file and the name of the place that led to it."""

    path: str
    place: str


@dataclass(frozen=True)
class Place:
    """One place that was looked at. `state` says what is true of it: `not set`, `2 found`, `nothing there`.

    `root` marks the places that hold folders of Python packages, which are all looked at in the same way.
    """

    name: str
    where: str
    state: str
    found: tuple[str, ...] = ()
    root: bool = False


@dataclass(frozen=True)
class Search:
    """The candidates for one platform, best first, and every place looked at. `named`: the user named the plugin."""

    platform: str
    candidates: tuple[Candidate, ...]
    places: tuple[Place, ...]
    named: bool = False


def search(platform: str, explicit: str | None, environ: Mapping[str, str]) -> Search:
    """Look for the plugins of `platform` (cuda, rocm, tpu or cpu). `explicit` is the file given with `--plugin`.

    Raises RequestError when that is empty.
    """
    places: list[Place] = []
    if explicit == "":
        raise RequestError("--plugin", "names no file", todo="name the plugin's .so file, or leave the flag out")
    if explicit is not None:
        return _named(platform, "--plugin", explicit, places)
    variable = environ.get(PLUGIN_PATH)
    name = f"${PLUGIN_PATH}"
    if variable and counts_for(variable, platform):
        return _named(platform, name, variable, places)
    if variable:
        what = "a tpu plugin" if kind_of_file(variable) == "tpu" else "not a tpu plugin"
        places.append(Place(name, variable, f"{what}, which does not count for {platform}"))
    else:
        places.append(Place(name, "", "not set"))
    places += [_look_under(name, folders, platform) for name, folders in _roots(environ)]
    if platform == "tpu":
        places.append(_place("system libraries", "/lib, /usr/lib, /usr/local/lib", SYSTEM_LIBTPU))
    if platform == "cpu":
        fetched = cache_folder(environ) / "plugins" / "cpu"
        places.append(_place("fetched plugins", f"{fetched}/*/*.so", _glob(fetched, "[!.]*/*.so")))
    return Search(platform, _distinct(places), tuple(places))


def counts_for(path: str, platform: str) -> bool:
    """Whether a plugin file named for every platform may be for this one: tpu files for tpu only, and the reverse."""
    return (kind_of_file(path) == "tpu") == (platform == "tpu")


def kind_of_file(path: str) -> str | None:
    """The platform that the file's own name says it is for."""
    return kind_of(os.path.basename(path))


def _named(platform: str, name: str, path: str, places: list[Place]) -> Search:
    places.append(Place(name, path, "named", (path,)))
    return Search(platform, (Candidate(path, name),), tuple(places), named=True)


def _roots(environ: Mapping[str, str]) -> list[tuple[str, list[pathlib.Path]]]:
    """The searched roots: a name for each and the package folders that exist below it."""
    user = home(environ)
    active = environ.get("VIRTUAL_ENV")
    venvs = user / ".local" / "venvs"
    name = "$VIRTUAL_ENV" if active else "$VIRTUAL_ENV (not set)"
    roots = [(name, _packages([pathlib.Path(active)] if active else []))]
    roots.append(("~/.local/venvs/*", _packages(_glob(venvs, "*"))))
    roots += [(f"~/{name}", _packages([user / name])) for name in (".venv", "venv", ".local")]
    roots += [(str(root), _packages([root])) for root in SYSTEM_ROOTS]
    roots.append(("this interpreter's site-packages", own_packages()))
    return roots


def own_packages() -> list[pathlib.Path]:
    """The package folders of the running interpreter."""
    named = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    if hasattr(site, "getsitepackages"):  # some virtual environments replace `site` with one that lacks it
        named += site.getsitepackages()
    return [pathlib.Path(path) for path in dict.fromkeys(named)]


def _packages(roots: Iterable[pathlib.Path]) -> list[pathlib.Path]:
    return [
        folder
        for root in roots
        for library in ("lib", "lib64")
        for packages in ("site-packages", "dist-packages")
        for folder in _glob(root, f"{library}/python3.*/{packages}")
    ]


def _look_under(name: str, folders: Iterable[pathlib.Path], platform: str) -> Place:
    found = [path for folder in folders for pattern in PATTERNS[platform] for path in _glob(folder, pattern)]
    return _place(name, f"{_PACKAGES}/{_shape(platform)}", found, root=True)


def _place(name: str, where: str, files: Iterable[pathlib.Path], *, root: bool = False) -> Place:
    found = tuple(dict.fromkeys(str(file) for file in files if _is_file(file)))
    return Place(name, where, f"{len(found)} found" if found else "nothing there", found, root)


def _is_file(path: pathlib.Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


def _glob(folder: pathlib.Path, pattern: str) -> list[pathlib.Path]:
    """Matches below `folder`, higher version numbers first; a folder that cannot be read matches nothing."""
    try:
        return sorted(folder.glob(pattern), key=_natural, reverse=True)
    except OSError:
        return []


def _natural(path: pathlib.Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(path))]


def _distinct(places: Iterable[Place]) -> tuple[Candidate, ...]:
    """Every file once, at the first place that has it: roots overlap, and lib64 is often a link to lib."""
    files: dict[str, Candidate] = {}
    for place in places:
        for path in place.found:
            files.setdefault(os.path.realpath(path), Candidate(path, place.name))
    return tuple(files.values())


def resolution_text(result: Search, reasons: Mapping[str, str]) -> str:
    """Where a search looked and what became of what it found: `reasons` gives a line for each path that did not do."""
    others = [place for place in result.places if not place.root]
    entries = [_entry(place, path, reasons) for place in others for path in place.found or ("",)]
    roots = [place for place in result.places if place.root]
    found = [_entry(place, path, reasons) for place in roots for path in place.found]
    empty = [place.name for place in roots if not place.found]
    if roots and not found:
        found = [
            f"no {' or '.join(PATTERNS[result.platform])} under any searched root. "
            f"Roots searched: {_listed(empty)} — each at {roots[0].where}"
        ]
    elif empty:
        found.append(f"nothing under the other roots: {_listed(empty)}")
    entries[1:1] = found  # the named plugin comes first, then the roots, then what only this platform has
    lines = [f"PJRT {result.platform} plugin resolution — where Tlaloc looked:"]
    lines += [f"  {number}. {entry}" for number, entry in enumerate(entries, 1)]
    fix = f"check that the {result.platform} device and its driver are there" if result.candidates else ""
    if result.named:
        fix += ", or name another plugin"
    return "\n".join([*lines, f"Fix: {fix}." if fix else f"Fix: {fix_text(result.platform)}"])


def _entry(place: Place, path: str, reasons: Mapping[str, str]) -> str:
    if path:
        return f"{place.name}: {path}: {reasons[path]}" if path in reasons else f"{place.name}: {path}"
    return f"{place.name}: {place.where} ({place.state})" if place.where else f"{place.name}: {place.state}"


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])}, and {names[-1]}"


def _shape(platform: str) -> str:
    patterns = PATTERNS[platform]
    return patterns[0] if len(patterns) == 1 else f"{{{','.join(patterns)}}}"


def fix_text(platform: str) -> str:
    """What to do about a missing plugin of `platform`, in one line."""
    export = f"export {PLUGIN_PATH}=/path/to/the/plugin.so"
    return {
        "cuda": f"{export}, or `pip install jax[cuda12]` into a venv under ~/.local/venvs/ (or activate it).",
        "rocm": f"{export}, or install a package that has jax_plugins/*rocm*/*.so into a venv under ~/.local/venvs/ "
        "(or activate it).",
        "tpu": f"{export} (a libtpu.so), or `pip install libtpu` into a venv under ~/.local/venvs/ (or activate it).",
        "cpu": f"{FETCH_CPU}, or {export}.",
    }[platform]


def skip_text(searches: Iterable[Search], reasons: Mapping[str, str]) -> str:
    """The SKIP text: nothing to run on, every place looked at for each platform, and the fix.

    `reasons` says for each candidate path why it did not do, in one line.
    """
    searches = tuple(searches)
    names = [result.platform for result in searches]
    works = " that works here" if any(result.candidates for result in searches) else ""
    if len(names) == 1:
        first = f"SKIP: no PJRT {names[0]} plugin found{works}, so there is nothing to run on."
    else:
        first = f"SKIP: no PJRT plugin found{works} ({', '.join(names)}), so there is nothing to run on."
    return "\n".join([first, *(resolution_text(result, reasons) for result in searches)])
