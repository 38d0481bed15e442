"""PyTorch's DistributedDataParallel over Gloo, as a careful hand would write it.

With `"fused"` the update is one function, which is not torch's default. The input costs next to nothing: whole batches
are indexed in tensors that are in memory. The losses are not those of Keras, since the weights start otherwise; the
models have the same shapes.
"""

import os
import time
from collections.abc import Callable

import models

from contestants import BATCH, Case, Sum, timed_sums


def start() -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{os.environ['RENDEZVOUS']}", rank=rank, world_size=size)


def build(case: Case, update: str = "default") -> Callable[[], tuple[float, float]]:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    rank, size = dist.get_rank(), dist.get_world_size()
    model = models.torch_model(case.model)
    if size > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = models.torch_optimizer(case.optimizer, model.parameters(), fused=True if update == "fused" else None)
    loss_of = torch.nn.CrossEntropyLoss()
    x, y = (torch.from_numpy(array)[rank::size].contiguous() for array in models.examples(case.model))

    def run() -> tuple[float, float]:
        total, right, times = torch.zeros(()), torch.zeros(()), []
        for step in range(case.steps):
            begin = step * BATCH % len(x)
            some_x, some_y = x[begin : begin + BATCH], y[begin : begin + BATCH]
            optimizer.zero_grad(set_to_none=True)
            logits = model(some_x)
            loss = loss_of(logits, some_y)
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                total += loss
                right += (logits.argmax(1) == some_y).float().mean()
            if (step + 1) % case.steps_per_execution == 0:
                loss_so_far, _ = total.item() / (step + 1), right.item() / (step + 1)
                times.append(time.perf_counter())
        return times[-1] - times[0], loss_so_far

    return run


def build_sum(job: Sum) -> Callable[[], tuple[float, float]]:
    import torch
    import torch.distributed as dist

    own, result = torch.full([job.count], float(dist.get_rank() + 1)), torch.empty([job.count])

    def total() -> torch.Tensor:
        result.copy_(own)  # the sum replaces what it is made of
        dist.all_reduce(result)
        return result

    return lambda: timed_sums(total, lambda tensor: tensor[-1].item(), job.times, dist.get_world_size())
