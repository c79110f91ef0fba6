"""Tensors that are alike share a row of what is at the peak."""

from collections.abc import Sequence
from dataclasses import replace

from tensile_jax.memory_report.alike import Alike, AtPeak, alike, largest_lines, largest_of
from tensile_jax.memory_report.records import Held, Tensor

MIB = 2**20
SILU = Tensor(
    "Block_0:logistic", "activation", 4 * MIB, (16, 64, 1024), "float32", 3, 90, "Block_0/logistic", "train.py:16",
    "x = nn.silu(x)", "", "train.py:43", "backward Block_0/mul", "train.py:16",
)  # fmt: skip
JOINED = replace(SILU, name="concatenate", nbytes=8 * MIB, shape=(16, 64, 2048), made_at="train.py:31", code="y = join(x, skip)")
GRU = replace(
    SILU, name="scan_3", made_by="logistic", made_at="train.py:13", code="z = sigmoid(x @ w)", stacked_at="train.py:19",
    called_from="train.py:38", last_used_by="backward scan", last_used_at="train.py:19",
)  # fmt: skip
WEIGHT = replace(
    SILU, name="w", role="parameter", made_by="", made_at="", code="", called_from="", last_used_by="mul",
    last_used_at="train.py:50",
)  # fmt: skip


def named(tensor: Tensor, *names: str) -> list[Tensor]:
    return [replace(tensor, name=name) for name in names]


def held(*tensors: Tensor) -> list[Held]:
    return [Held(t.name, t.role, t.nbytes, t) for t in tensors]


def lines(*tensors: Tensor, rows: int = 10) -> Sequence[str]:
    return [" ".join(line.split()) for line in largest_lines(held(*tensors), rows=rows, more="more")]


def test_tensors_of_one_form_role_and_line_are_alike_and_groups_are_sorted_by_their_bytes() -> None:
    several = named(SILU, "a", "b", "c")
    backward = replace(SILU, made_by="backward Block_0/mul")
    assert alike([JOINED, *several, backward, WEIGHT]) == [
        Alike(tuple(several)), Alike((JOINED,)), Alike((backward,)), Alike((WEIGHT,)),
    ]  # fmt: skip
    assert [(g.nbytes, g.sizes, g.name) for g in alike([JOINED, *several])] == [
        (12 * MIB, "3 x 4 MiB", "a and 2 more"), (8 * MIB, "", "concatenate"),
    ]  # fmt: skip


def test_a_row_has_the_line_of_code_and_says_what_is_kept_for_the_backward_pass() -> None:
    assert lines(*named(SILU, "a", "b")) == [
        "8 MiB 2 x 4 MiB float32[16,64,1024] a and 1 more",
        "train.py:16 x = nn.silu(x) kept for the backward pass",
    ]
    assert lines(JOINED)[1] == "train.py:31 y = join(x, skip) kept for the backward pass of line 16"
    assert lines(replace(SILU, last_used_by="add"))[1] == "train.py:16 x = nn.silu(x)"
    assert lines(replace(SILU, last_used_by="add", last_used_at="train.py:20"))[1].endswith("last used at line 20")
    assert lines(replace(SILU, last_used_by="add", last_used_at="loss.py:7"))[1].endswith("last used at loss.py:7")
    assert lines(replace(SILU, made_by="backward mul"))[1].endswith("made in the backward pass")
    assert lines(replace(SILU, last_used_by="", last_used_at=""))[1] == "train.py:16 x = nn.silu(x)"
    later = [replace(SILU, last_used_at=f"train.py:{line}") for line in (14, 32, 33)]
    assert lines(*later[:2])[1].endswith("kept for the backward pass of lines 14 and 32")
    assert lines(*later)[1].endswith("kept for the backward pass of 3 lines")
    assert lines(SILU, replace(SILU, last_used_by="add"))[1].endswith("1 of them kept for the backward pass")


def test_what_a_loop_stacks_names_the_operators_in_its_body_and_the_caller() -> None:
    assert lines(GRU, replace(GRU, made_by="Cell/tanh"))[1:] == [
        "train.py:13 z = sigmoid(x @ w) kept for the backward pass",
        "logistic, tanh: stacked by the loop at train.py:19, called from train.py:38",
    ]


def test_an_argument_has_one_line_and_long_lines_are_shortened() -> None:
    assert lines(WEIGHT) == ["4 MiB float32[16,64,1024] w (parameters)"]
    long = list(largest_lines(held(replace(SILU, name="n" * 99, code="x" * 99)), rows=1, more="more"))
    assert max(map(len, long)) <= 110 and "nnn...nnn" in long[0] and "xxx...  kept" in long[1]


def test_the_rest_has_a_number_and_a_largest() -> None:
    assert lines(JOINED, *named(SILU, "a"), WEIGHT, rows=1)[-1] == "8 MiB in 2 more tensors of at most 4 MiB (more)"
    assert lines(JOINED, SILU, rows=1)[-1] == "4 MiB in 1 more tensor (more)"
    assert len(lines(JOINED, rows=1)) == 2


def test_the_table_of_what_is_at_the_peak_adds_up() -> None:
    parts = (*held(JOINED, *named(SILU, "a", "b")), Held("3 tensors below 1 KiB", "batch", 512), Held("gaps", "packing", 1024))
    table = [line.split() for line in str(AtPeak(parts)).splitlines()]
    assert table[1:] == [
        ["8", "MiB", "activations", "float32[16,64,2048]", "concatenate", "train.py:31"],
        ["8", "MiB", "2", "x", "4", "MiB", "activations", "float32[16,64,1024]", "a", "and", "1", "more", "train.py:16"],
        ["1", "KiB", "packing", "gaps"],
        ["512", "B", "batch", "3", "tensors", "below", "1", "KiB"],
        ["16", "MiB", "together,", "the", "predicted", "peak"],
    ]
    many = [replace(SILU, name=str(i), shape=(i,)) for i in range(100)]
    assert "75 more rows" in str(AtPeak(tuple(held(*many)))) and len(str(AtPeak(tuple(held(*many)))).splitlines()) == 28
    assert repr(AtPeak(parts)) == str(AtPeak(parts)) and list(AtPeak(parts)) == list(parts) and AtPeak(parts)[:1] == parts[:1]


def test_the_largest_are_single_tensors_and_name_a_tie() -> None:
    found = largest_of(held(JOINED, *named(SILU, "a", "b", "c")), 2)
    assert [t.name for t in found] == ["concatenate", "a"] and (len(found), found.tied) == (2, 2)
    assert "2 more tensors are as large as the last one: report.largest(4) has them, too." in str(found)
    assert "train.py:16 (backward)" in str(found)
    assert str(largest_of([], 3)).split() == ["size", "role", "form", "name", "made", "at", "last", "used", "at"]
