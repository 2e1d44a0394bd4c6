"""Numbers read by compiled code: whatever the text, the answer is that of Python's own JSON reader."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from support.processes.damaged_documents import EXAMPLE, random_document

from formulations.instances import contest
from formulations.instances.contest_scan import TOO_LARGE, cut_out_rows
from formulations.problem.strategy_problem import ProblemError, StrategyProblem


def content(problem: StrategyProblem) -> object:
    """All that a problem says, as plain Python values."""
    flags = [None if t.forbidden is None else t.forbidden.tolist() for t in (*problem.nodes, *problem.factors)]
    costs = [t.cost.tolist() for t in (*problem.nodes, *problem.factors)]
    terms = [(scope, t.resource, t.start, t.end, t.amount.tolist()) for scope, t in problem.usage_terms()]
    scopes = [factor.scope for factor in problem.factors]
    return problem.name, problem.resources, problem.horizon, scopes, costs, flags, terms


def both_answers(text: bytes, monkeypatch: pytest.MonkeyPatch) -> tuple[object, object, bool]:
    """What the compiled reader and Python's say, and whether the first one did it all itself."""

    def answer() -> object:
        try:
            return content(contest.parse_contest_problem(text))
        except ProblemError as error:
            return str(error)

    slow_calls = []
    listed = contest._listed
    with monkeypatch.context() as context:
        context.setattr(contest, "_listed", lambda rows, field: slow_calls.append(1) or listed(rows, field))
        fast = answer()
    with monkeypatch.context() as context:
        context.setattr(contest, "cut_out_rows", lambda data: None)
        return fast, answer(), not slow_calls


def test_valid_files_need_no_slow_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = random.Random(0)
    for indent in (None, None, 1):
        for _ in range(60):
            text = json.dumps(random_document(generator), indent=indent).encode()
            fast, slow, alone = both_answers(text, monkeypatch)
            assert fast == slow
            assert alone
    assert both_answers(json.dumps(EXAMPLE, separators=(",", ":")).encode(), monkeypatch)[2]


def test_texts_cut_short_or_damaged_get_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps(EXAMPLE).encode()
    characters = b' []{},:"\\0129-.eE\n\x00\xff'
    generator = random.Random(1)
    for at in range(len(text)):
        other = generator.choice(characters)
        for damaged in (text[:at], text[:at] + text[at + 1 :], text[:at] + bytes([other]) + text[at:]):
            fast, slow, _ = both_answers(damaged, monkeypatch)
            assert fast == slow, damaged


NUMBERS = ["0", "-0", "00", "01", "1.0", "1e3", "true", '"1"', "null", "[1]", "{}", "+1", "\u0661", "9" * 5000] + [
    str(n + d) for n in (10**18, 2**62, 2**63, 2**64, 10**19, 10**40) for d in (-2, -1, 0, 1)
]


@pytest.mark.parametrize("place", ["15", "10", "30]", "30,", "70"])
def test_every_kind_of_number_in_every_table(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps(EXAMPLE)
    for number in NUMBERS:
        changed = text.replace(place, number + place[2:], 1).encode()
        fast, slow, _ = both_answers(changed, monkeypatch)
        assert fast == slow, number


@pytest.mark.parametrize("name", ["[[1]]", 'a"]', "\\", "\\\\", "\n\t", "é\ud800"[:1], "[", "{[[", "\u2028"])
def test_brackets_in_strings_are_no_lists(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for ascii_only in (True, False):
        document = {"problem": {**EXAMPLE["problem"], "name": name}}
        text = json.dumps(document, ensure_ascii=ascii_only).encode()
        fast, slow, alone = both_answers(text, monkeypatch)
        assert fast == slow
        assert isinstance(fast, tuple)
        assert fast[0] == name
        assert alone


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32", "utf-16-le"])
def test_other_encodings_get_the_same_answer(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow, _ = both_answers(json.dumps(EXAMPLE).encode(encoding), monkeypatch)
    assert fast == slow
    assert isinstance(fast, tuple)


@pytest.mark.parametrize("value", [[[0]], [0], [], [[]], [[[1]]], {}, 0, None, "[0]", [[1], 2]])
def test_lists_in_wrong_places_get_the_same_answer(value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = EXAMPLE["problem"]
    for changed in (
        *({**problem, key: value} for key in problem),
        *({**problem, "nodes": {**problem["nodes"], key: value}} for key in problem["nodes"]),
        *({**problem, "edges": {**problem["edges"], key: value}} for key in problem["edges"]),
    ):
        fast, slow, _ = both_answers(json.dumps({"problem": changed}).encode(), monkeypatch)
        assert fast == slow, changed


def test_rows_are_cut_out_with_their_numbers() -> None:
    text = b'{"a": [[1, 22], [], [9223372036854775807, 9223372036854775808]], "b]": [ ], "c": [[0]]}'
    cut = cut_out_rows(text)
    assert cut is not None
    skeleton, tables = cut
    assert json.loads(skeleton) == {"a": [0], "b]": [1], "c": [2]}
    assert [rows.values.tolist() for rows in tables] == [[1, 22, 2**63 - 1, TOO_LARGE], [], [0]]
    assert [rows.sizes.tolist() for rows in tables] == [[2, 0, 2], [], [1]]
    assert all(rows.values.dtype == np.int64 for rows in tables)
    for other in (b"[1]", b"[[1], 2]", b"[[1],]", b"[[1,]]", b"[[1 2]]", b"[[1]", b"[[01]]", b"[[1.]]", b"[", b"[["):
        assert cut_out_rows(other) is None
    assert cut_out_rows(b"") == (b"", [])
