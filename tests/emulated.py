"""What a captured CUDA graph does, on a CPU: a phase is recorded once, operation by operation, and replayed.

A replay repeats the operations on the memory that they used when they were recorded, and nothing else: no Python, no
read of what a device would have to be waited for: a number that no tensor from before the recording went into is the
host's own. Before each replay everything that any recording holds besides the engine's state is overwritten, for graphs
share their memory. So whatever a piece leaves to Python, to the host, or to memory of its own shows.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from bullettrain.engine.cuda_graphs import CudaGraphRunner

READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::masked_select"}
DRAWS = ("rand", "normal", "uniform", "bernoulli", "exponential")


class Recording(TorchDispatchMode):
    """The operations of one piece, with where in memory they read and write."""

    def __init__(self):
        super().__init__()
        self.operations = []
        self.host = set()  # memory that is filled without a look at any other

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [t for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)]
        name = func._schema.name
        own = all(memory(t) in self.host for t in given) and not any(word in name for word in DRAWS)
        by_mask = "index" in name and any(t.dtype == torch.bool for t in given[1:])  # how many is for the device to say
        if (name in READS or by_mask) and not own:
            raise RuntimeError(f"{func} reads back while a graph is captured")
        out = func(*args, **(kwargs or {}))
        places = {memory(t) for t in tree_leaves(out) if torch.is_tensor(t)}
        self.host = self.host | places if own else self.host - places  # also where it is written to
        self.operations.append((func, *tree_map(place, (args, kwargs or {}, out))))
        return out


class EmulatedRunner(CudaGraphRunner):
    """The runner of CUDA graphs, with graphs that are recorded and replayed on a CPU."""

    def _new_pool(self):
        return []  # all recordings: they share their memory

    def _synchronize(self):
        pass

    def _now(self):
        return 0.0

    def _generator_state(self):
        return torch.get_rng_state()

    def _set_generator_state(self, state):
        torch.set_rng_state(state)

    def _run_aside(self, function):
        function()

    def _free_generator(self):
        pass

    def _capture(self, function):
        """Record a phase. A capture runs nothing: what the recording changed is put back."""
        state = [*self.state(), *self._inputs.values(), *self._static.values()]
        state += [t for call in self._calls.values() for t in call.outputs]
        saved = [t.detach().clone() for t in state]
        recording = Recording()
        try:
            with recording:
                function()
        finally:
            with torch.no_grad():
                for tensor, value in zip(state, saved, strict=True):
                    tensor.copy_(value)
        self.pool.append(recording.operations)
        return _Graph(recording.operations, self.pool)


class _Graph:
    def __init__(self, operations, pool):
        self.operations, self.pool = operations, pool

    def replay(self):
        with torch.no_grad():
            for operations in self.pool:
                for _, args, kwargs, out in operations:
                    for made in fresh(args, kwargs, out):
                        made.fill_(float("nan") if made.is_floating_point() else 0)
            for func, args, kwargs, out in self.operations:
                again = func(*args, **kwargs)
                for made, value in zip(tree_leaves(out), tree_leaves(again), strict=True):
                    if any(made is one for one in fresh(args, kwargs, out)):
                        made.copy_(value)


def memory(tensor):
    """Where it lies."""
    return tensor.untyped_storage().data_ptr()


def place(value):
    """A tensor as a place in memory, without its history."""
    if not torch.is_tensor(value):
        return value
    return torch.as_strided(value.detach(), value.size(), value.stride(), value.storage_offset())


def fresh(args, kwargs, out):
    """The outputs of an operation that lie in memory of their own."""
    given = {memory(t) for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)}
    return [t for t in tree_leaves(out) if torch.is_tensor(t) and memory(t) not in given]
