"""Weka sessions: sub-agents, scopes, rows recorded twice, folders; what is refused and how."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from trace_files import call, hits_of, ids_of, session, subagent, write_lines

from kvoffload.errors import TraceError
from kvoffload.traces import Trace, open_trace


def read(tmp_path: Path, *sessions: object) -> Trace:
    """The trace of a JSONL file with these sessions."""
    return open_trace(write_lines(tmp_path / "t.jsonl", sessions))


def refused(tmp_path: Path, value: object, *parts: str) -> None:
    """Reading the session raises a TraceError with all the parts."""
    with pytest.raises(TraceError) as caught:
        read(tmp_path, value)
    for part in ("t.jsonl:1", *parts):
        assert part in str(caught.value)


def test_session_is_read(tmp_path: Path) -> None:
    """A session's requests carry its name, times in seconds, the stop reason and the server time."""
    trace = read(
        tmp_path,
        session(
            "s", [call(0.0, [3, 4], stop="tool_use", api_time=2.5), call(9.25, [3, 4, 5], api_time=None)]
        ),
    )
    first, second = trace.requests
    assert (trace.block_tokens, trace.partial_tail, trace.form, trace.aligned) == (64, "floor", "weka", True)
    assert (first.session, first.agent, first.t, first.finish_reason, first.service_s) == (
        "s",
        "main",
        0.0,
        "tool_use",
        2.5,
    )
    assert (second.t, second.turn, second.parent, second.service_s, second.finish_reason) == (
        9.25,
        1,
        0,
        None,
        "",
    )
    assert (second.input_tokens, second.output_tokens, second.ids.tolist()) == (197, 7, [3, 4, 5])


@pytest.mark.parametrize("base", [0.0, 10.0])
def test_sub_agent_times_are_relative_or_absolute(tmp_path: Path, base: float) -> None:
    """Inner times before the entry's are relative to it, others absolute; turns follow time."""
    inner = [call(base + 0.0, [8]), call(base + 4.0, [8, 9])]
    trace = read(tmp_path, session("s", [call(0.0, [1]), subagent(10.0, "x", inner), call(12.0, [1, 2])]))
    assert [(r.agent, r.t, r.turn, r.parent) for r in trace.requests] == [
        ("main", 0.0, 0, -1),
        ("x", 10.0, 1, 0),
        ("main", 12.0, 2, 0),
        ("x", 14.0, 3, 1),
    ]


def test_sub_agents_nest(tmp_path: Path) -> None:
    """A sub-agent of a sub-agent is read, relative to its own entry."""
    deep = subagent(5.0, "deep", [call(1.0, [20])])
    trace = read(tmp_path, session("s", [call(0.0, [1]), subagent(100.0, "x", [call(0.0, [8]), deep])]))
    assert [(r.agent, r.t) for r in trace.requests] == [("main", 0.0), ("x", 100.0), ("deep", 106.0)]


def test_trap_local_ids_are_per_session(tmp_path: Path) -> None:
    """Trap 4: equal local ids in two sessions share nothing; a session and its sub-agents share."""
    one = session("a", [call(0.0, [0, 1]), subagent(1.0, "x", [call(1.0, [0, 1, 2])])])
    trace = read(tmp_path, one, {**one, "id": "b"}, {**one, "id": "c"})
    assert ids_of(trace) == [[0, 1], [0, 1, 2], [3, 4], [3, 4, 5], [6, 7], [6, 7, 8]]
    assert hits_of(ids_of(trace)) == 3 * 2


def test_trap_global_ids_are_rekeyed(tmp_path: Path) -> None:
    """Trap 4: global ids collide between sessions: only equal prefixes are shared."""
    a = session("a", [call(0.0, [1, 2, 3])], scope="global")
    b = session("b", [call(0.0, [1, 2, 4])], scope="global")
    c = session("c", [call(0.0, [9, 2, 3])], scope="global")
    trace = read(tmp_path, a, b, c)
    assert ids_of(trace) == [[0, 1, 2], [0, 1, 3], [4, 5, 6]]
    assert "re-keyed" in trace.notes[0]
    with pytest.raises(TraceError, match="hash_id_scope = local after global"):
        read(tmp_path, a, session("d", [call(0.0, [1])]))


def test_ids_per_context_are_refused_or_rekeyed(tmp_path: Path) -> None:
    """Local ids that mean other blocks in a sub-agent are not chained: named, and readable with rekey."""
    bad = session("s", [call(0.0, [1, 2]), subagent(1.0, "x", [call(1.0, [2, 1])])])
    refused(
        tmp_path,
        bad,
        "session s, request 1",
        "id 2 (block 0) follows nothing here and id 1 elsewhere",
        "--rekey",
    )
    assert ids_of(open_trace(tmp_path / "t.jsonl", rekey=True)) == [[0, 1], [2, 3]]


def test_rows_recorded_twice_count_once(tmp_path: Path) -> None:
    """An s row that repeats an n row of its agent is left out, once each; other s rows stay."""
    rows = [
        call(0.0, [1], "s", ttft=0.5),
        call(0.1, [1]),
        call(5.0, [1, 2]),
        call(5.1, [1, 2], "s"),
        call(6.0, [1, 2], "s"),
        call(9.0, [1, 2, 3], "s"),
        subagent(10.0, "x", [call(10.0, [1], "s")]),
    ]
    trace = read(tmp_path, session("s", rows))
    assert [(r.agent, r.t) for r in trace.requests] == [
        ("main", 0.1),
        ("main", 5.0),
        ("main", 6.0),
        ("main", 9.0),
        ("x", 10.0),
    ]
    assert trace.notes == ("2 requests of type s left out: their turns are there as type n",)


def test_fewer_ids_than_tokens_pass_and_more_do_not(tmp_path: Path) -> None:
    """AgentX may count more input tokens than blocks hold; more blocks than tokens are refused."""
    assert len(read(tmp_path, session("s", [{**call(0.0, [1]), "in": 640}])).requests) == 1
    refused(tmp_path, session("s", [{**call(0.0, [1, 2]), "in": 127}]), "2 ids for 127 tokens", "at most 1")


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ({**session("s", []), "extra": 1}, ["unknown field extra = 1"]),
        (
            session("s", [call(0.0, [1], colour="red")]),
            ["session s, request 0", 'unknown field colour = "red"'],
        ),
        (session("s", [call(0.0, [1], ttft=1.0)]), ["unknown field ttft"]),
        (session("s", [{**subagent(0.0, "x", []), "colour": 1}]), ["request 0", "unknown field colour"]),
        (
            session("s", [call(0.0, [1]), subagent(1.0, "x", [call(0.0, [1], z=1)])]),
            ["request 1, x, request 0"],
        ),
        (session("s", []), ["no requests"]),
        (session("", [call(0.0, [1])]), ['id = ""']),
        (session("s", [call(0.0, [1])], scope="world"), ['hash_id_scope = "world"', "local or global"]),
        (session("s", [call(0.0, [1])], size=0), ["block_size = 0"]),
        (session("s", [call(0.0, [1], "q")]), ['type = "q"', "n, s or subagent"]),
        (session("s", [call(-1.0, [1])]), ["t = -1.0"]),
        (session("s", [{**call(0.0, [1]), "in": -64}]), ["in = -64"]),
        (session("s", [{**call(0.0, [1]), "out": "9"}]), ['out = "9"']),
        (session("s", [call(0.0, [1.5])]), ["hash_ids = 1.5"]),  # type: ignore[list-item]
        (session("s", [7]), ["request 0", "not a JSON object"]),
        (session("s", [subagent(0.0, "main", [])]), ["agent_id"]),
        (session("s", [{**call(0.0, [1]), "t": None}]), ["t = null"]),
        ({"requests": []}, ["no field id"]),
        ({**session("s", []), "requests": {}}, ["requests = {}", "a list"]),
    ],
)
def test_bad_session_names_its_place(tmp_path: Path, value: object, parts: list[str]) -> None:
    """An unknown field or a bad value is refused with file, line, session, request and field."""
    refused(tmp_path, value, *parts)


def test_block_sizes_must_agree(tmp_path: Path) -> None:
    """Sessions of two block sizes in one trace are refused with both places."""
    with pytest.raises(TraceError, match=r"t\.jsonl:2.*block_size = 128, but 64 at .*t\.jsonl:1"):
        read(
            tmp_path, session("a", [call(0.0, [1])]), session("b", [{**call(0.0, [1]), "in": 128}], size=128)
        )


def test_files_and_folders(tmp_path: Path) -> None:
    """One session as indented JSON, plain or .gz, and a folder of sessions in order of name, read alike."""
    folder = tmp_path / "sessions"
    folder.mkdir()
    (folder / "2.json").write_text(json.dumps(session("b", [call(0.0, [1])]), indent=1))
    (folder / "1.json.gz").write_bytes(gzip.compress(json.dumps(session("a", [call(0.0, [1])])).encode()))
    write_lines(folder / "3.jsonl", [session(name, [call(0.0, [1])]) for name in "cd"])
    (folder / "README.md").write_text("not a trace")
    trace = open_trace(folder)
    assert [(r.session, r.ids.tolist()) for r in trace.requests] == [
        ("a", [1]),
        ("b", [2]),
        ("c", [3]),
        ("d", [4]),
    ]
    assert open_trace(folder / "2.json").name == "2.json"
    write_lines(folder / "4.jsonl", [session("a", [call(0.0, [1])])])
    with pytest.raises(TraceError, match=r"4\.jsonl:1: session a is also at .*1\.json\.gz; remove one"):
        open_trace(folder)
    write_lines(folder / "4.jsonl", [{"input_length": 1, "hash_ids": []}])
    with pytest.raises(TraceError, match=r"4\.jsonl:1: not a Weka session"):
        open_trace(folder)
    (tmp_path / "none").mkdir()
    with pytest.raises(TraceError, match=r"no \.json"):
        open_trace(tmp_path / "none")


def test_broken_document_and_wrong_form_are_refused(tmp_path: Path) -> None:
    """A .json file that is not JSON names its line; delta form is not for sessions."""
    (tmp_path / "s.json").write_text('{\n "id": "s",\n bad\n}')
    with pytest.raises(TraceError, match=r"s\.json:3: not JSON"):
        open_trace(tmp_path / "s.json")
    (tmp_path / "s.json").write_text(json.dumps(session("s", [call(0.0, [1])])))
    with pytest.raises(TraceError, match="not delta form"):
        open_trace(tmp_path / "s.json", form="delta")
