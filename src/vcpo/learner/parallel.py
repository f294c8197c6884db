"""Several processes that make one update together, each from its share of the trajectories.

All ranks hold the records of the whole minibatch (they are small) and run forward and backward passes for their own
share. What the method needs of the others is one small table of numbers per trajectory, exchanged after every pass;
what the optimizer needs is one reduction per parameter at the end of the step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class DataParallel:
    """One process. Also the interface of the others.

    rank, size: of this process among the learners.
    needs_equal_passes: whether every rank must run as many passes as the others, because the model communicates.
    """

    rank = 0
    size = 1
    needs_equal_passes = False

    def sum(self, table: Tensor) -> Tensor:
        """The sum over ranks of a small float64 tensor on the CPU."""
        return table

    def first(self, sentence: str | None) -> str | None:
        """The sentence of the lowest rank that has one; all ranks get it."""
        return sentence

    def before_pass(self, is_last: bool) -> None:
        """A forward and backward pass follows; ``is_last``: of this step."""

    def after_passes(self) -> None:
        """The step's passes are done."""

    def reduce(self, gradient: Tensor | None, master: Tensor) -> Tensor:
        """The gradient summed over ranks, laid out as ``master`` is; ``None`` stands for 0."""
        return torch.zeros_like(master) if gradient is None else gradient

    def whole(self, tensor: Tensor) -> Tensor:
        """All of a tensor that may be laid out as the parameters are; every rank gets it."""
        return tensor

    def share(self, whole: Tensor, master: Tensor) -> Tensor:
        """The inverse of ``whole``: a new tensor with these values and the layout and dtype of ``master``."""
        return whole.to(master, copy=True)


class Replicated(DataParallel):
    """Every rank has the whole model, as under ``DistributedDataParallel``; one all-reduce per parameter.

    The wrapper itself is not used: it reduces the parameters' ``grad`` in the backward pass, before baselines are
    known. Construct the model with the same weights on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def sum(self, table: Tensor) -> Tensor:
        """See ``DataParallel``."""
        device = torch.device("cuda") if dist.get_backend(self._group) == "nccl" else torch.device("cpu")
        moved = table.to(device, copy=True)
        dist.all_reduce(moved, group=self._group)
        return moved.cpu()

    def first(self, sentence: str | None) -> str | None:
        """See ``DataParallel``."""
        sentences: list[Any] = [None] * self.size
        dist.all_gather_object(sentences, sentence, group=self._group)
        return next((each for each in sentences if each is not None), None)

    def reduce(self, gradient: Tensor | None, master: Tensor) -> Tensor:
        """See ``DataParallel``."""
        gradient = torch.zeros_like(master) if gradient is None else gradient
        dist.all_reduce(gradient, group=self._group)
        return gradient


class Sharded(Replicated):
    """Every rank has a shard of every parameter (FSDP2); one reduce-scatter per parameter.

    Layers are gathered for their forward and backward passes as FSDP2 does it. Gradients with norms do not go through
    FSDP2's own reduction: they are complete only when the baselines are, and are reduced then.
    """

    needs_equal_passes = True

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        """Shards ``model`` in place: one unit per decoder layer, and one for the rest.

        Construct the model with the same weights on all ranks.
        """
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        super().__init__(group)
        parameter = next(model.parameters())
        device_type = parameter.device.type
        self._mesh = (
            DeviceMesh.from_group(group, device_type)
            if group is not None
            else dist.device_mesh.init_device_mesh(device_type, (self.size,))
        )
        # several passes and ranks are summed in float32 or better
        fine = torch.promote_types(parameter.dtype, torch.float32)
        options: Any = {"mesh": self._mesh, "mp_policy": MixedPrecisionPolicy(reduce_dtype=fine)}
        for layer in _decoder_layers(model):
            fully_shard(layer, **options)
        self._model: Any = fully_shard(model, **options)
        # gradients are sums over trajectories, whose coefficients contain every average
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # not every backend knows the scaled sum

    def before_pass(self, is_last: bool) -> None:
        """See ``DataParallel``. Gradients of the earlier passes stay on their ranks, to be reduced with the last."""
        self._model.set_requires_gradient_sync(is_last)

    def after_passes(self) -> None:
        """See ``DataParallel``. A forward without backward has left the outermost unit gathered, with these weights."""
        self._model.reshard()

    def reduce(self, gradient: Tensor | None, master: Tensor) -> Tensor:
        """See ``DataParallel``."""
        from torch.distributed.tensor import DTensor, Partial

        assert isinstance(master, DTensor)
        if isinstance(gradient, DTensor):
            return gradient
        if gradient is None:
            gradient = torch.zeros(master.shape, dtype=master.dtype, device=master.device)
        partial = DTensor.from_local(gradient, self._mesh, [Partial()], run_check=False)
        return partial.redistribute(placements=master.placements)

    def whole(self, tensor: Tensor) -> Tensor:
        """See ``DataParallel``. Gathers, so all ranks must call it."""
        from torch.distributed.tensor import DTensor

        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def share(self, whole: Tensor, master: Tensor) -> Tensor:
        """See ``DataParallel``. Every rank takes its part of its own ``whole``."""
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(master, DTensor)
        local = whole.to(master.device, master.dtype)
        return distribute_tensor(local, master.device_mesh, master.placements, src_data_rank=None).clone()


def _decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The members of the list of layers that has most of the model's parameters: not the experts within a layer."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    sizes = [sum(p.numel() for p in layers.parameters()) for layers in lists]
    return list(lists[sizes.index(max(sizes))]) if lists else []
