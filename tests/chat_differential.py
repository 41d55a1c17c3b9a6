"""Compare the chat templates with real Jinja rendering.

    ORACLE_PYTHON tests/chat_differential.py [--golden FILE] DIR

Needs the `jinja2` package, and DIR with the Jinja texts of real models, one a file, byte for byte as the models have
them; they are not part of this repository. Each text that `choose_template` knows is rendered over many conversations
and compared; a text it does not know is named. A chat that we refuse because the model's template would drop a message
in silence is counted apart. `--golden` also writes what Jinja gives for two conversations, which
the host tests read. Exit status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import pathlib
import random
import sys
from collections.abc import Iterator
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from tlaloc_serve.artifact.chat import ChatTemplate, Message, choose_template  # noqa: E402
from tlaloc_serve.errors import RequestError, TokenizerError  # noqa: E402

CONTENTS = [
    "Hello",
    "",
    "  spaces around \n",
    "\n\nnew lines\n\n",
    "two\nlines",
    "<think>\nhm\n</think>\n\nYes.",
    "</think>",
    " ",
    "<think>a</think>b</think>\nc",
    "<tool_response>\nx\n</tool_response>",
    "<|im_end|>",
    "</s> [INST]",
    "\u4e16\u754c",
]
GOLDEN = {
    "plain": [("user", " What is 2+2?\n"), ("assistant", "4"), ("user", "And 3+3?")],
    "system": [("system", "Be brief. "), ("user", "Hi"), ("assistant", " Hello! "), ("user", "Bye")],
}


def conversations(rng: random.Random) -> Iterator[list[tuple[str, str]]]:
    """Every order of up to four roles, and longer chats in turns, over awkward contents."""
    for length in range(1, 5):
        for roles in itertools.product(("system", "user", "assistant"), repeat=length):
            for _ in range(4):
                yield [(role, rng.choice(CONTENTS)) for role in roles]
    for _ in range(300):
        turns = [(("user", "assistant")[i % 2], rng.choice(CONTENTS)) for i in range(rng.randint(1, 9))]
        if rng.random() < 0.5:
            turns.insert(0, ("system", rng.choice(CONTENTS)))
        yield turns


def jinja_renderer(text: str, template: ChatTemplate) -> Any:
    """`(messages, add_generation_prompt) -> text`, with the environment that the transformers package sets up."""
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    compiled = environment.from_string(text)

    def render(turns: list[tuple[str, str]], open_reply: bool) -> str | None:
        messages = [{"role": role, "content": content} for role, content in turns]
        try:
            return compiled.render(
                messages=messages, add_generation_prompt=open_reply, bos_token=template.bos, eos_token=template.eos
            )
        except TemplateError:
            return None

    return render


def compare(text: str, template: ChatTemplate, show: str) -> tuple[int, int, int]:
    """How many conversations were compared, how many are refused for a system message in their middle, and differ."""
    render = jinja_renderer(text, template)
    count = refused = wrong = 0
    for turns in conversations(random.Random(5)):
        for open_reply in (True, False):
            want = render(turns, open_reply)
            try:
                got = template.render([Message(*turn) for turn in turns], open_reply)
            except RequestError:
                got = None
            count += 1
            if got is None and want is not None and any(role == "system" for role, _ in turns[1:]):
                refused += 1
            elif got != want:
                wrong += 1
                if wrong <= 3:
                    print(f"{show}: {turns}\n  got  {got!r}\n  want {want!r}")
    return count, refused, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--golden", type=pathlib.Path)
    options = parser.parse_args()
    wrong_total = 0
    golden: dict[str, dict[str, str]] = {}
    for path in sorted(options.folder.iterdir()):
        text = path.read_bytes().decode("utf-8")
        try:
            template = choose_template(path.name, text)
        except TokenizerError as error:
            print(f"not compared: {error}")
            continue
        count, refused, wrong = compare(text, template, path.name)
        print(f"{path.name}: {template.name}, {count} conversations, {refused} refused, {wrong} differ")
        wrong_total += wrong
        if "strftime_now" in text:
            continue  # holds the day it was rendered on
        render = jinja_renderer(text, template)
        chats = {name: render(turns, True) for name, turns in GOLDEN.items()}
        golden[template.name] = {name: chat for name, chat in chats.items() if chat is not None}
    if options.golden:
        options.golden.write_text(json.dumps(golden, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 1 if wrong_total else 0


if __name__ == "__main__":
    sys.exit(main())
