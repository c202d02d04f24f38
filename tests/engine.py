"""The one door from the tests to the library's private modules: all other tests ask public functions.

What no public function tells stands behind it: what the table of primitives says of one equation (a rule that is too
careful changes no number); algorithms that are compared with a search or a sum, case by case (`adding`, `cuts`, `holds`);
and what a test switches off, or sets to what it is for another compiler, device or JAX, or in a new process (all other
modules).
"""

from optax_accum._core import adding, compilers, convolutions, versions
from optax_accum._core.dtypes import holds
from optax_accum._core.state import warn_of_no_window
from optax_accum._rows import cuts, locality, registry, traces
from optax_accum._space import collectives, device, mapped, meshes

__all__ = ["adding", "claims_of", "collectives", "compilers", "convolutions", "cuts", "device", "holds", "known"]
__all__ += ["mapped", "meshes", "registered", "says", "set_rules", "versions", "view_of", "warn_of_no_window"]

# The table of primitives

known = registry.known
registered = registry.names
view_of = traces.view_of


def claims_of(name):
    """What the table has a rule for."""
    row, none = known(name), registry.Known()
    return [
        claim for claim in ("local", "partial", "alike", "positional") if getattr(row, claim) != getattr(none, claim)
    ]


def says(view):
    """What the table says of an equation: how micro-batches run it, or that it runs on all rows "together"."""
    kept = [axis for axis in view.outs if axis is not None] if view.name in locality.NESTED else view.outs
    if locality.is_local(view._replace(outs=kept)):
        return "local"
    if locality.is_partial(view):
        return "partial"
    if locality.is_positional(view):
        return "positional"
    return "alike" if locality.is_alike(view) else "together"


def set_rules(monkeypatch, name, **rules):
    """Rules of a primitive in place of the table's."""
    monkeypatch.setitem(registry._table, name, registry.Known(**rules))
