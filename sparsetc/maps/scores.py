"""Functions of a score and its position -> an elementwise function, and numbers that do not depend on scores.

In: a function (score, b, h, i, j) of torch operations, which may read tensors: slopes of heads, documents of positions,
a table of biases by distance. Out: a `Score`: operations that kernels have, on the score and on numbers by row, column,
entry, or by a whole number of query and key. These numbers are what the function reads of tensors, and whatever else of
positions kernels have no operation for. They are computed by the function's own operations before the kernel, with
gradients for the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from itertools import combinations
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from sparsetc.maps.body import Side
from sparsetc.maps.elementwise import COMPARED, INPUT, Argument, Elementwise, Ref
from sparsetc.maps.pairs import Pairs
from sparsetc.maps.trace import FLOATS, SIZE, Reader, Untraced, graph_of, name_of
from sparsetc.support import cached_property

SCORE = "s"
POSITIONS: dict[str, Side] = {"b": "rows", "h": "rows", "i": "rows", "j": "columns"}
"""Numbers of a batch, head, query and key, in the order in which a function takes them; and their sides."""
FLOAT_INTEGERS = 1 << 24
"""Whole numbers below are exact in float32."""
LONGEST = 1 << 20
"""Queries, keys or heads up to which whole numbers made of their numbers are exact in kernels."""
AT_ONCE = 1 << 22
"""Most numbers for which positions of all heads are in memory at once. Not measured."""
WHOLE = frozenset({*COMPARED, "abs", "add", "maximum", "minimum", "mul", "sub", "where"})
"""Operations that kernels have on whole numbers."""


def taken_apart(function: Callable[..., Tensor], tensors: Sequence[Tensor], device: torch.device) -> Score:
    """Take a function apart; the same code that reads other tensors of these types gives the same.

    Args:
        function: of a user.
        tensors: that it may read.
        device: of scores.

    Raises:
        Untraced: it cannot be traced, or has an operation on scores that kernels lack.
    """
    stand_ins = [torch.full((SIZE,), 0.5, device=device)]
    stand_ins += [torch.zeros(SIZE, dtype=torch.int64, device=device) for _ in POSITIONS]

    def called(*inputs: Tensor) -> tuple[Tensor]:
        result = function(*inputs)
        if not isinstance(result, Tensor):
            raise TypeError(f"it returns {type(result).__name__}")
        return (result,)

    graph = graph_of(called, stand_ins)
    score = Score(graph, tensors)
    for name in {str(node.target) for node in graph.graph.nodes if node.op == "get_attr"}:
        delattr(graph, name)  # nodes keep their graph, which is to keep no tensors
    return score


class Score(Reader):
    """A function of a score and its position, taken apart: what kernels lack, and the score is not read for, left out.

    Attributes:
        function: of the score and of the numbers below.
        numbers: by name, the node of the graph that gives them, and the positions that it reads.
        whole: of some of these, a whole number of i and j that kernels have, and by which alone they depend on i and j;
            of two such numbers, as of a table's rows and columns, one is made.
        places: of the tensors that the function reads, by the names of nodes: which of them.
        reads: the positions, and maybe the score, that a node depends on.
        integers: numbers that kernels have as whole numbers, of any size. (Positions are float32 there.)
        most: magnitudes that other whole numbers do not pass.
        sized: nodes that depend on the size of the arguments.
    """

    def __init__(self, graph: torch.fx.GraphModule, tensors: Sequence[Tensor]) -> None:
        self.known = [*map(id, tensors)]
        self.reads: dict[Node, frozenset[str]] = {}
        self.integers: set[Ref] = set()
        self.most: dict[Any, float] = {}
        self.sized: set[Node] = set()
        self.numbers: dict[str, tuple[Node, frozenset[str]]] = {}
        self.single: dict[str, Ref] = {}
        self.places: dict[Node, int] = {}
        super().__init__(graph, [SCORE, *POSITIONS])
        if self.outputs[0] is None:
            raise Untraced("it returns a tensor of another shape")
        operations = tuple(self.builder.operations)
        self.function = Elementwise(operations, {"z": self.outputs[0]})
        self.whole = {name: Elementwise(operations, {"n": ref}) for name, ref in self.single.items()}

    def input(self, node: Node, name: str) -> Argument:
        self.reads[node] = frozenset({name})
        node.meta["position"] = name
        argument = super().input(node, name)
        if name != SCORE:
            self.most[argument] = LONGEST
        return argument

    def constant(self, node: Node, tensor: Tensor) -> Any:
        self.reads[node] = frozenset()
        if id(tensor) in self.known:
            self.places[node] = self.known.index(id(tensor))
            node.meta["val"] = tensor.detach().to("meta")
            return self._number(node)
        node.meta["constant"] = tensor.detach()
        return super().constant(node, tensor)

    def result(self, node: Node) -> Any:
        self.reads[node] = frozenset[str]().union(*(self.reads[one] for one in node.all_input_nodes))
        if any(isinstance(one, list | tuple) and SIZE in one for one in node.args) or self.sized & {
            *node.all_input_nodes
        }:
            self.sized.add(node)
        try:
            if any(self.values[one] is None for one in node.all_input_nodes):
                raise Untraced("it reads a tensor at places that depend on scores")
            result = super().result(node)
            self._check_whole(node, result)
            return result
        except Untraced:
            if SCORE in self.reads[node]:
                raise
        return self._number(node)

    def _check_whole(self, node: Node, result: Any) -> None:
        """Raise `Untraced` where kernels would round whole numbers that torch does not round."""
        arguments = [self.values[one] if isinstance(one, Node) else one for one in node.args]
        kind, name = node.meta["val"].dtype, name_of(node)
        integer = not (kind == torch.bool or kind in FLOATS)
        refs = [one for one in arguments if isinstance(one, Ref)]
        constants: list[Any] = [one for one in arguments if isinstance(one, int | float) and not isinstance(one, Ref)]
        if integer and name == "mul" and len(refs) > 1:
            raise Untraced("products of positions may be too large for float32")
        most = [*(self.most.get(one, 0) for one in refs), *map(abs, constants if integer else ())] or [0]
        if kind not in FLOATS and max(most) > FLOAT_INTEGERS:
            raise Untraced("whole numbers may be too large for float32")
        alpha: Any = node.kwargs.get("alpha", 1)
        if integer:  # of a remainder and of a quotient the divisor comes last
            bounds = {"mul": prod(most), "remainder": most[-1], "floor_divide": most[0] // max(1, most[-1]) + 1}
            bounds |= {"clamp": max(most[1:])} if len(constants) == 2 else {}
            bound = bounds.get(name, sum(most))
            self.most[result] = bound * max(1, abs(alpha))
        if not any(one in self.integers for one in refs):
            return
        constants += [alpha] if alpha != 1 else []
        if integer and name == "where":
            refs = refs[1:]
        exact = name in WHOLE and all(abs(one) < FLOAT_INTEGERS for one in constants)
        if integer:
            exact &= not constants and all(one in self.integers for one in refs)
            self.integers.add(result)
        if not exact and name not in ("_to_copy", "alias", "clone"):
            raise Untraced(f"kernels have no {name} of whole numbers")

    def _number(self, node: Node) -> Any:
        """Add an input for the numbers of a node, one a position; return None if it has others."""
        if node in self.sized:
            raise Untraced("it makes a tensor of its arguments' shape")
        value, reads = node.meta["val"], self.reads[node]
        if tuple(value.shape) != (SIZE,) and (reads or value.numel() != 1):
            return None
        name = f"x{len(self.numbers)}"
        self.numbers[name] = node, reads
        single = self._alone(node, reads & {"i", "j"}) if "j" in reads else None
        if single is not None:
            self.single[name] = single
        number = self.builder.add(INPUT, name)
        if value.dtype == torch.bool:
            return self.builder.add("ne", number, 0)
        if value.dtype not in FLOATS:
            assert isinstance(number, Ref)
            self.integers.add(number)
        return number

    def _alone(self, node: Node, both: frozenset[str]) -> Any:
        """Return a whole number by which alone a node depends on i and j, or on j: one of the graph, or made of two."""
        before = [one for one in node.graph.nodes if one in self.reads]
        wholes = list[tuple[Node, Any]]()
        for one in reversed(before):
            ref, kind = self.values.get(one), one.meta["val"].dtype
            integer = isinstance(ref, Ref) and kind not in (*FLOATS, torch.bool) and ref not in self.integers
            if integer and set() < self.reads[one] <= both and self.most.get(ref, FLOAT_INTEGERS) < FLOAT_INTEGERS:
                wholes.append((one, ref))
        for cut in (*combinations(wholes, 1), *combinations(wholes, 2)):
            nodes, refs = zip(*cut, strict=True)
            ref, *columns = sorted(refs, key=self.most.__getitem__, reverse=True)
            otherwise = set[Node]()
            for other in before:
                if other not in nodes:
                    depends = other.meta.get("position") in both or not otherwise.isdisjoint(other.all_input_nodes)
                    otherwise |= {other} if depends else set()
            width = 2 * max(self.most[one] for one in columns) + 1 if columns else 1  # columns are of both signs
            if node in otherwise or self.most[ref] * width + width >= FLOAT_INTEGERS:
                continue
            for column in columns:
                ref = self.builder.add("add", self.builder.add("mul", ref, width), column)
            return ref
        return None

    def sides(self, shared: bool, placed: Container[str]) -> dict[str, Side]:
        """Return the sides of all inputs but the score; heads of columns may be `shared` by heads of rows.

        Those of `placed` have numbers by place, and not by entry.
        """
        names = self.function.reads - {SCORE}
        sides: dict[str, Side] = {}
        for name, (_, reads) in self.numbers.items():
            if name in names:
                sides[name] = "columns" if "j" in reads else "rows"
                if "j" in reads and ("i" in reads or (shared and "h" in reads)):
                    sides[name] = "places" if name in placed else "entries"
        names = names.union(*(self.whole[name].reads for name, side in sides.items() if side == "places"))
        return sides | {name: side for name, side in POSITIONS.items() if name in names}

    def reached(self, name: str, pairs: Pairs) -> dict[str, Tensor]:
        """Return a pair, i and j (1, places), for each whole number of a number by place; none if there are too many.

        Places of negative numbers come last, and those that no pair has are of any pair: nothing else is read.
        """

        def whole(i: Tensor, j: Tensor) -> Tensor:
            return self.whole[name].of({"i": i.double(), "j": j.double()}).long().expand_as(i)

        ends = [torch.stack(whole(*some).aminmax()) for some in pairs.met() if some[0].numel()]
        if not ends:
            return {}
        least, most = min(0, int(torch.stack(ends).min())), max(0, int(torch.stack(ends).max()))
        if most - least >= LONGEST:
            return {}
        pair = torch.full((most - least + 1,), -1, device=pairs.device)
        for i, j in pairs.met():  # one number a pair: those of one place are written in any order
            pair[whole(i, j) % len(pair)] = i * pairs.shape[1] + j
        pair = pair.where(pair >= 0, pair.amax())[None]
        return {"i": pair // pairs.shape[1], "j": pair % pairs.shape[1]}

    def computed(self, name: str, positions: Mapping[str, Tensor], tensors: Sequence[Tensor]) -> Tensor:
        """Return (heads, size) numbers of an input, from positions b and h (heads, 1), and i or j (1, size)."""
        node, reads = self.numbers[name]
        size = next(positions[name].shape[1] for name in "ij" if name in positions)
        heads = len(positions["b"])
        sizes = 1 if reads.isdisjoint("bh") else heads, 1 if reads.isdisjoint("ij") else size
        spread = {name: positions[name].expand(sizes) for name in reads}
        if prod(sizes) <= AT_ONCE or sizes[0] == 1:
            result = self._value(node, {name: one.flatten() for name, one in spread.items()}, tensors).reshape(sizes)
        else:  # a head after another: positions of all would take more memory than the result
            each = [{name: one[n] for name, one in spread.items()} for n in range(heads)]
            result = torch.stack([self._value(node, one, tensors) for one in each])
        return result.expand(heads, size)

    def _value(self, node: Node, positions: Mapping[str, Tensor], tensors: Sequence[Tensor]) -> Tensor:
        """Return what a node of the graph gives of positions, of as many modes as when it was traced."""
        known: dict[Node, Any] = {}
        for one in self.before[node]:
            if one.op == "placeholder":
                known[one] = positions[one.meta["position"]]
            elif one.op == "get_attr":
                known[one] = tensors[self.places[one]] if one in self.places else one.meta["constant"]
            else:
                args = map_arg(one.args, known.__getitem__)
                known[one] = one.target(*args, **one.kwargs)  # type: ignore[operator]
        return known[node]  # type: ignore[no-any-return]

    @cached_property
    def before(self) -> dict[Node, list[Node]]:
        """The nodes that each number is computed by, in order."""
        order: dict[Node, list[Node]] = {}
        for node, _ in self.numbers.values():
            reached, waiting = {node}, [node]
            while waiting:
                more = [one for one in waiting.pop().all_input_nodes if one not in reached]
                reached.update(more)
                waiting += more
            order[node] = [one for one in node.graph.nodes if one in reached]
        return order
