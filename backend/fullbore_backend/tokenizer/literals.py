"""The literals of a template: finding those that reach its output, and rewriting them."""

from __future__ import annotations

from collections.abc import Callable

from jinja2 import nodes

_SEARCHES = frozenset(
    {"split", "rsplit", "partition", "rpartition", "startswith", "endswith", "find", "rfind"}
    | {"index", "rindex", "count", "strip", "lstrip", "rstrip", "removeprefix", "removesuffix"}
)
"""String methods whose arguments are looked for in a text and not put into one."""


def rewrite_literals(node: nodes.Node, rewrite: Callable[[str], str]) -> None:
    """Apply ``rewrite`` to every string of a template that can be part of what it prints.

    Strings that are only compared with others, or searched in them, stay as they are: a template
    must still recognise ``'<think>'`` in a message. Changes the tree in place.
    """
    if isinstance(node, nodes.TemplateData):
        node.data = rewrite(node.data)
    elif isinstance(node, nodes.Const):
        if isinstance(node.value, str):
            node.value = rewrite(node.value)
    else:
        for child in _printed(node):
            rewrite_literals(child, rewrite)


def _printed(node: nodes.Node) -> list[nodes.Node]:
    """The children of a node whose strings can reach the output."""
    children = list(node.iter_child_nodes())
    if isinstance(node, nodes.Compare | nodes.Test):
        return []
    if isinstance(node, nodes.Pair):
        return [node.value]
    if isinstance(node, nodes.Getitem):
        return [node.node]
    if isinstance(node, nodes.Filter) and node.name == "replace":
        return _without(children, node.args[:1])
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):
        if node.node.attr in _SEARCHES:
            return [node.node]
        if node.node.attr == "replace":
            return _without(children, node.args[:1])
    return children


def _without(children: list[nodes.Node], left_out: list[nodes.Expr]) -> list[nodes.Node]:
    return [child for child in children if all(child is not other for other in left_out)]
