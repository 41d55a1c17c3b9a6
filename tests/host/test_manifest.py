"""Manifests: what is read, what is refused and by which name."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import unittest
from typing import Any

from tests.support import load_json, shared
from tlaloc_serve.artifact.manifest import Entry, Ladder, Manifest, Role
from tlaloc_serve.artifact.parse import parse_manifest
from tlaloc_serve.errors import ArtifactError

ARTIFACTS = ("reference-v1", "reference-v2", "reference-v2-aliased", "window-v3")


def parse(document: Any) -> Manifest:
    return parse_manifest(json.dumps(document).encode(), "manifest")


def window() -> Any:
    return load_json(shared("artifacts", "window-v3", "tlaloc-serving.json"))


class Reading(unittest.TestCase):
    def test_real_manifests_survive_a_round_trip(self) -> None:
        for name in ARTIFACTS:
            with self.subTest(name):
                document = load_json(shared("artifacts", name, "tlaloc-serving.json"))
                self.assertEqual(parse(document).to_json(), document)

    def test_unknown_keys_are_ignored_everywhere(self) -> None:
        document = window()
        for record in (
            document,
            document["model"],
            document["weights"],
            document["entries"][0],
            document["bucketLadder"],
        ):
            record["aKeyOfTomorrow"] = {"x": [1]}
        self.assertEqual(parse(document), parse(window()))

    def test_a_missing_weight_table_reads_as_empty(self) -> None:
        document = load_json(shared("artifacts", "reference-v1", "tlaloc-serving.json"))
        del document["weights"]["table"]
        self.assertEqual(parse(document).weights, ())

    def test_where_a_weight_came_from(self) -> None:
        document = window()
        record = document["weights"]["table"][0]
        record["sources"] = [{"file": "model.safetensors", "tensor": "t", "offset": 8, "byteLength": 4}] * 2
        record["sourceSha256"] = "0" * 64
        self.assertEqual(parse(document).to_json(), document)
        new = parse(document).weights[0]
        self.assertEqual((len(new.sources), new.source_sha256), (2, "0" * 64))
        del record["sourceSha256"]  # exporter 0.1.0 had one hash a source instead
        record["sources"] = [{**source, "sha256": "1" * 64} for source in record["sources"]]
        self.assertEqual(parse(document).weights[0], dataclasses.replace(new, source_sha256=None))

    def test_the_ladder_rounds_up_and_never_clamps(self) -> None:
        ladder = Ladder(16, (1, 2, 4), (64, 128))
        self.assertEqual([ladder.fit_context(n) for n in (1, 64, 65, 128, 129)], [64, 64, 128, 128, None])


class Refusing(unittest.TestCase):
    def refused(self, document: Any, *words: str) -> None:
        with self.assertRaises(ArtifactError) as caught:
            parse(document)
        for word in words:
            self.assertIn(word, str(caught.exception))

    def test_versions_by_name(self) -> None:
        for version, words in (
            ("tlaloc-serving-v4", ["linear-attention"]),
            ("tlaloc-serving-v5", ["speculative"]),
            ("tlaloc-serving-v6", ["unknown version", "tlaloc-serving-v6"]),
            ("v2", ["unknown version"]),
            ("", ["schemaVersion"]),
        ):
            with self.subTest(version):
                self.refused({**window(), "schemaVersion": version}, "schemaVersion", *words)

    def test_what_a_version_does_not_have(self) -> None:
        self.refused({**window(), "schemaVersion": "tlaloc-serving-v2"}, "windowedKv")
        document = window()
        del document["model"]["windowedKv"]
        self.refused({**document, "schemaVersion": "tlaloc-serving-v1"}, "entries")

    def test_the_short_ring(self) -> None:
        self.refused(
            load_json(shared("artifacts", "window-v3", "tlaloc-serving-short-ring.json")), "ringPages", "window"
        )

    def test_what_is_not_implemented(self) -> None:
        for key, value in (
            ("kvQuant", "int8"),
            ("linearState", {"x": 1}),
            ("mtpDraftTokens", 2),
            ("cudaKernels", ["k"]),
        ):
            document = window()
            document["model"][key] = value
            with self.subTest(key):
                self.refused(document, f"model.{key}", "not implemented")

    def test_a_ladder_point_without_its_entry(self) -> None:
        document = window()
        document["entries"] = [
            entry for entry in document["entries"] if (entry["kind"], entry["context"]) != ("decode", 32)
        ]
        self.refused(document, "decode_b1_c32")

    def test_text_that_is_not_json(self) -> None:
        real = json.dumps(window()).encode()
        for data in (
            b"",
            b"[]",
            b"null",
            real[:-1],
            real[: len(real) // 2],
            b"\xff" + real,
            b'{"a": NaN}',
            b"[" * 100_000,
        ):
            with self.subTest(data[:20]), self.assertRaises(ArtifactError):
                parse_manifest(data, "manifest")

    def test_a_key_given_twice(self) -> None:
        text = json.dumps(window()).replace('"modelName"', '"schemaVersion": "tlaloc-serving-v3", "modelName"', 1)
        with self.assertRaisesRegex(ArtifactError, "schemaVersion.*twice"):
            parse_manifest(text.encode(), "manifest")


class Mutations(unittest.TestCase):
    """A seeded mutation of a real manifest is refused by the field's name, or changes nothing that is computed."""

    def test_each_is_refused_by_name_or_equivalent(self) -> None:
        document, original = window(), parse(window())
        places = [place for place in _places(document) if _worth_it(place)]
        generator = random.Random(20261129)
        refused = equivalent = 0
        for place in generator.sample(places, 220):
            mutation, key, structural = _mutate(document, place, generator)
            with self.subTest(place=place, key=key):
                try:
                    accepted = parse(mutation)
                except ArtifactError as error:
                    refused += 1
                    self.assertTrue(error.field)
                    if structural:
                        self.assertIn(key, str(error))
                else:
                    equivalent += 1
                    self.assertEqual(_computed(accepted), _computed(original))
        self.assertGreater(refused, 60)
        self.assertGreater(equivalent, 3)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in items for place in [(*path, key), *_places(item, (*path, key))]]


def _worth_it(place: tuple[Any, ...]) -> bool:
    """The head of the manifest, a few weights, a decode and a prefill entry: the rest repeats their shape.

    Left out are the values that nothing inside a manifest can contradict: which ids are refused, and the hashes of
    weights (those are compared with the files, in test_store).
    """
    if place[0] == "entries":
        return len(place) > 1 and place[1] in (0, 7) and (len(place) < 4 or place[3] in (0, 3, 8, 20))
    if place[0] == "weights" and len(place) > 2:
        return place[2] in (0, 1, 29) and place[-1] != "sha256"
    return "refusedTokens" not in place


def _mutate(document: Any, place: tuple[Any, ...], generator: random.Random) -> tuple[Any, str, bool]:
    """A changed copy, the name of the key that was touched, and whether its kind (not just its value) changed."""
    mutation = copy.deepcopy(document)
    parent = mutation
    for step in place[:-1]:
        parent = parent[step]
    last, value = place[-1], parent[place[-1]]
    key = next(str(step) for step in reversed(place) if isinstance(step, str))
    if isinstance(last, str) and generator.random() < 0.4:
        del parent[last]
        return mutation, key, True
    if generator.random() < 0.5:
        parent[last] = generator.choice(
            [other for other in (1.5, "x", None, True, [], {}) if type(other) is not type(value)]
        )
        return mutation, key, True
    if isinstance(value, bool):
        parent[last] = not value
    elif isinstance(value, int):
        parent[last] = generator.choice([value + 1, value - 1, -value - 1, value * 2 + 1, 2**70])
    elif isinstance(value, str):
        parent[last] = generator.choice(["", value + "x", value[:-1], value.upper() + "!"])
    elif isinstance(value, list):
        parent[last] = generator.choice([value[1:], value + value[-1:], []])
    else:
        parent[last] = {}
    return mutation, key, False


def _computed(manifest: Manifest) -> Manifest:
    """The manifest without what only describes it (and without paths, which `store` follows or refuses)."""

    def plain(entry: Entry) -> Entry:
        # Weights are bound by name and pools are matched by it; the names of the other slots are labels.
        named = (Role.WEIGHT, Role.KV_POOL_IN, Role.WINDOW_KV_POOL_IN)
        inputs = tuple(slot if slot.role in named else dataclasses.replace(slot, name="") for slot in entry.inputs)
        outputs = tuple(dataclasses.replace(slot, name="") for slot in entry.outputs)
        return dataclasses.replace(entry, cache_key="", program_path="", inputs=inputs, outputs=outputs)

    model = dataclasses.replace(manifest.model, hidden_size=0, num_heads=0)
    weights = tuple(dataclasses.replace(weight, path="") for weight in manifest.weights)
    return dataclasses.replace(
        manifest,
        model_name="",
        model_hash="",
        model=model,
        weights=weights,
        weights_path=None,
        entries=tuple(plain(entry) for entry in manifest.entries),
    )


if __name__ == "__main__":
    unittest.main()
