"""The parser: what is read, and how a fault is reported. Random equations are in test_einsum.py."""

import pytest
import torch

from sparsetc.errors import EquationError, ShapeError, SparsetcError
from sparsetc.ir.equation.einsum import Bound, Einsum
from sparsetc.ir.equation.parse import _parse, parse, parse_arguments, parse_sublist


def read(text: str, *shapes: tuple[int, ...], sparse: tuple[int, ...] = (0,)) -> Bound:
    return parse(text, shapes, [p in sparse for p in range(len(shapes))])


@pytest.mark.parametrize(
    ("text", "shapes", "canonical", "sizes"),
    [
        ("ijk,jr,kr->ir", [(2, 3, 4), (3, 5), (4, 5)], "ijk,jr,kr->ir", "i=2 j=3 k=4 r=5"),
        (" i j , jk -> i k ", [(2, 3), (3, 4)], "ij,jk->ik", "i=2 j=3 k=4"),
        ("ij,jk", [(2, 3), (3, 4)], "ij,jk->ik", "i=2 j=3 k=4"),
        ("bA,Ba", [(2, 3), (4, 5)], "bA,Ba->ABab", "b=2 A=3 B=4 a=5"),
        ("ii", [(3, 3)], "ii->", "i=3"),
        ("ii->i", [(3, 3)], "ii->i", "i=3"),
        ("ij,,jr->ir", [(2, 3), (), (3, 4)], "ij,,jr->ir", "i=2 j=3 r=4"),
        ("ij->", [(2, 3)], "ij->", "i=2 j=3"),
        ("i...,j...", [(2, 3, 4), (5, 4)], "iab,jb->abij", "i=2 a=3 b=4 j=5"),
        ("...i->i...", [(2, 3)], "ai->ia", "a=2 i=3"),
        ("...i->i", [(2, 3)], "ai->i", "a=2 i=3"),
        ("ij->...i", [(2, 3)], "ij->i", "i=2 j=3"),
        ("a...,b...->ab...", [(2, 3), (4, 3)], "ac,bc->abc", "a=2 c=3 b=4"),
        ("ij,jk->ik", [(2, 3), (1, 4)], "ij,jk->ik", "i=2 j=3 k=4"),
        ("...i,...i->...", [(5, 2, 3), (1, 3)], "abi,bi->ab", "a=5 b=2 i=3"),
        ("...i,...i->...", [(2, 3), (5, 1, 1)], "bi,abi->ab", "b=2 i=3 a=5"),
    ],
)
def test_reads(text: str, shapes: list[tuple[int, ...]], canonical: str, sizes: str) -> None:
    bound = read(text, *shapes)
    assert str(bound) == f"{canonical}  {sizes}"
    assert bound.einsum.text == text


def test_a_dense_operand_is_expanded_to_the_full_shape() -> None:
    bound = read("ij,jk->ik", (2, 3), (1, 4))
    assert bound.shape(1) == (3, 4)
    assert bound.output_shape == (2, 4)


def test_text_does_not_take_part_in_equality() -> None:
    assert read("ij,jk", (2, 3), (3, 4)) == read("ij, jk -> ik", (2, 3), (3, 4))


def test_parses_are_cached_and_bounded() -> None:
    shapes = [torch.Size((2, 3)), [3, 4]]
    assert parse("ij,jk", shapes, [True, False]) is parse("ij,jk", [(2, 3), (3, 4)], (True, False))
    assert _parse.cache_info().maxsize is not None


def test_all_52_letters() -> None:
    text = "abcdefghijklmnopqrstuvwxyz,ABCDEFGHIJKLMNOPQRSTUVWXYZ->aZ"
    assert len(read(text, (1,) * 26, (1,) * 26).einsum.indices) == 52


FAULTS: list[tuple[str, list[tuple[int, ...]], type[SparsetcError], int, int, list[str]]] = [
    # text, shapes, class, start and length of the carets, words of the message
    ("ij,j1->i", [(2, 3), (3, 4)], EquationError, 4, 1, ["'1'", "expected indices a-z"]),
    ("ij;jk", [(2, 3)], EquationError, 2, 1, ["';'"]),
    ("ij\t,jk", [(2, 3), (3, 4)], EquationError, 2, 1, [r"'\t'"]),
    ("iö->i", [(2, 3)], EquationError, 1, 1, ["'ö'"]),
    ("ij-i", [(2, 3)], EquationError, 2, 1, ["'->'"]),
    ("ij- >i", [(2, 3)], EquationError, 2, 1, ["'->'"]),
    ("ij->i->j", [(2, 3)], EquationError, 5, 2, ["second '->'", "one output"]),
    ("ij->i,j", [(2, 3)], EquationError, 5, 1, ["',' after '->'", "one output"]),
    ("ij,jr->ik", [(2, 3), (3, 4)], EquationError, 8, 1, ["'k'", "no operand has", "'ijr'"]),
    ("ij,jr->iri", [(2, 3), (3, 4)], EquationError, 9, 1, ["'i' more than once"]),
    ("ij,jr->ir", [(2, 3)], EquationError, 0, 5, ["1 operands for 2 terms"]),
    ("ij,jr->ir", [(2, 3)] * 3, EquationError, 0, 5, ["3 operands for 2 terms"]),
    ("ij, jrs ->ir", [(2, 3), (3, 4)], EquationError, 4, 3, ["operand 2", "2 dimensions", "(3, 4)", "expected 3"]),
    ("ij,j->i", [(2, 3), (3, 4)], EquationError, 3, 1, ["operand 2", "2 dimensions", "expected 1", "or write '...'"]),
    ("ij,->i", [(2, 3), (3,)], EquationError, 3, 1, ["operand 2", "expected 0"]),
    ("ij...,j->i", [(2,), (3,)], EquationError, 0, 5, ["operand 1", "1 dimensions", "at least 2"]),
    ("i...j...->i", [(2, 3)], EquationError, 5, 3, ["second '...'"]),
    ("i..j->i", [(2, 3)], EquationError, 1, 1, ["'.' outside an ellipsis"]),
    ("i....->i", [(2, 3)], EquationError, 4, 1, ["'.' outside an ellipsis"]),
    ("ij->......", [(2, 3)], EquationError, 7, 3, ["second '...'"]),
    ("ijk,jr,kr->ir", [(2, 3, 4), (3, 5), (6, 5)], ShapeError, 7, 1, ["operand 3", "size 6", "'k'", "4", "operand 1"]),
    ("ij,j->i", [(2, 3), (0,)], ShapeError, 3, 1, ["operand 2", "size 0", "expected 3"]),
    ("ij,kk->i", [(2, 3), (4, 5)], ShapeError, 4, 1, ["operand 2", "size 5", "expected 4"]),
    ("ij,kk->i", [(2, 3), (1, 5)], ShapeError, 4, 1, ["operand 2", "size 5", "expected 1"]),
    ("...i,j...->ij", [(2, 3), (4, 5)], ShapeError, 6, 3, ["ellipsis of operand 2", "size 5", "expected 2"]),
    (
        "ij,jr->ir",
        [(2, 1), (3, 4)],
        ShapeError,
        1,
        1,
        ["operand 1, which is sparse", "size 1", "expected 3", "only dense"],
    ),
    ("...i,...i->i", [(1, 3), (5, 3)], EquationError, 0, 3, ["operand 1, which is sparse", "size 1", "expected 5"]),
]


@pytest.mark.parametrize(("text", "shapes", "error", "start", "length", "words"), FAULTS, ids=[f[0] for f in FAULTS])
def test_faults(
    text: str, shapes: list[tuple[int, ...]], error: type[SparsetcError], start: int, length: int, words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        read(text, *shapes)
    assert type(caught.value) is error
    assert isinstance(caught.value, ValueError)
    message, quoted, carets = str(caught.value).split("\n")
    assert quoted == f"    {text}"
    assert carets == f"    {' ' * start}{'^' * length}"
    for word in words:
        assert word in message


def test_no_sparse_operand() -> None:
    with pytest.raises(EquationError, match=r"no operand is sparse.*torch\.einsum"):
        read("ij,jk", (2, 3), (3, 4), sparse=())


def test_the_equation_must_be_text() -> None:
    with pytest.raises(EquationError, match="is a list; expected a string"):
        parse(["ij"], [(2, 3)], [True])  # type: ignore[arg-type]


def test_too_many_indices() -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    with pytest.raises(EquationError, match="at most 52 together"):
        read(f"{letters},{letters.upper()}...", (1,) * 26, (1,) * 27)


def test_every_fault_is_one_that_torch_refuses_too_unless_it_is_ours() -> None:
    for text, shapes, _, _, _, words in FAULTS:
        dense = [torch.ones(shape) for shape in shapes]
        if "sparse" in " ".join(words):
            torch.einsum(text, *dense)
            continue
        with pytest.raises((RuntimeError, ValueError)):
            torch.einsum(text, *dense)


def test_arguments() -> None:
    x, b = torch.ones(2, 3), torch.ones(3, 4)
    assert parse_arguments(["ij,jk", x, b]) == ("ij,jk", (x, b))
    assert parse_arguments(["ij,jk", [x, b]]) == ("ij,jk", (x, b))
    assert parse_arguments(["ij", x]) == ("ij", (x,))
    assert parse_arguments([x, [0, 1], b, [1, 26], [0, 26]]) == ("AB,Ba->Aa", (x, b))
    assert parse_arguments([x, (0, 1), b, (1, 2)]) == ("AB,BC", (x, b))
    assert parse_sublist([x, [Ellipsis, 51], [51, ...]]) == ("...z->z...", (x,))
    assert parse_sublist([x, []]) == ("", (x,))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "was given nothing"),
        ([torch.ones(2, 3), torch.ones(2)], "the list after operand 1 is a Tensor; expected an equation first"),
        ([torch.ones(2, 3)], "the output's list is a Tensor"),
        ([torch.ones(2, 3), [0, 52]], "holds 52; expected integers in 0..51 or Ellipsis"),
        ([torch.ones(2, 3), [0, -1]], "holds -1"),
        ([torch.ones(2, 3), [0, "i"]], "holds 'i'"),
        ([torch.ones(2, 3), [0, True]], "holds True"),
        ([torch.ones(2, 3), [0, 1.0]], r"holds 1\.0"),
    ],
)
def test_argument_faults(args: list[object], words: str) -> None:
    with pytest.raises(EquationError, match=words):
        parse_arguments(args)


def test_the_canonical_text_parses_to_itself() -> None:
    e = Einsum((("i", "j"), ("j", "r")), ("i", "r"), (0,), "")
    assert read(str(e), (2, 3), (3, 4)).einsum == e
