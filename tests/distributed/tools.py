"""Trainings by tools that bring their own loop, started by torchrun: accelerate, Hugging Face's Trainer, Lightning.

Each takes half of the steps and saves by the tool's own means. A new loop with a new model and a new optimizer
resumes from what was saved. The results have "saved", the state of a plain module that has read the saved file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from distributed.engines import Wrap, eager, full_state, mean_over_workers, report_of
from distributed.nets import BATCH, STEPS, LanguageModel, Net, Result, optimizer_of, seed_worker, share
from onnxtrain.ortmodule import ORTModule

HALF = STEPS // 2

Batch = tuple[torch.Tensor, ...]


def _size() -> int:
    """Return how many samples of a batch are this worker's."""
    return BATCH // dist.get_world_size()


def _samples(batches: list[Batch]) -> Batch:
    """Return all samples of some batches, in their order."""
    return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))


def _by_worker(batches: list[Batch]) -> Batch:
    """Return all samples, in each batch those of worker 0 first: accelerate gives each worker neighbours."""
    world = dist.get_world_size()
    return _samples([share(batch, rank, world) for batch in batches for rank in range(world)])


def _loader(samples: Batch, sampler: type[DistributedSampler[Any]] | None = None) -> DataLoader[Any]:
    data = TensorDataset(*samples)
    order = None if sampler is None else sampler(data, shuffle=False)
    # Without a generator of its own a loader draws from the one that dropout draws from.
    return DataLoader(data, _size(), sampler=order, generator=torch.Generator())


def _read(net: Net, read: Callable[[nn.Module], Any]) -> dict[str, torch.Tensor]:
    """Return the state of a plain module whose numbers `read` has replaced."""
    module = net.module()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    read(module)
    return module.state_dict()


def with_accelerate(net: Net, fsdp_version: int | None = None) -> Result:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin
    from safetensors.torch import load_model

    plugin = None if fsdp_version is None else FullyShardedDataParallelPlugin(fsdp_version=fsdp_version)
    losses: list[float] = []
    for half in range(2):
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        assert accelerator.num_processes == dist.get_world_size()
        # On the CPU it takes no notice of the plugin.
        assert accelerator.distributed_type == "MULTI_CPU"
        ort = ORTModule(net.module())
        model, optimizer, loader = accelerator.prepare(
            ort, optimizer_of(ort), _loader(_by_worker(net.batches()))
        )
        seed_worker(dist.get_rank())
        if half:
            # Random numbers, too, continue where they were.
            accelerator.load_state("half")
            loader = accelerator.skip_first_batches(loader, HALF)
        for batch in loader:
            optimizer.zero_grad()
            loss = model(*batch)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            if len(losses) == HALF:
                break
        assert accelerator.unwrap_model(model) is ort
        assert ort.report().runs_in_onnxruntime, str(ort.report())
        if not half:
            accelerator.save_state("half")
            accelerator.wait_for_everyone()
    saved = _read(net, lambda module: load_model(module, Path("half/model.safetensors")))
    return {"losses": losses, "state": accelerator.get_state_dict(model), "saved": saved}


def _without_first(tokens: torch.Tensor) -> torch.Tensor:
    """Return labels of which the first one is ignored."""
    return torch.cat([torch.full_like(tokens[:1], -100), tokens[1:]])


def _as_rows(net: Net) -> list[dict[str, torch.Tensor]]:
    """Return the samples as Hugging Face's Trainer takes them, by the names of the arguments of `forward`."""
    samples = list(zip(*_by_worker(net.batches()), strict=True))
    if net.make is LanguageModel:
        # The Trainer divides by the number of labels, of which the model shifts the first one away.
        return [{"input_ids": tokens, "labels": _without_first(tokens)} for (tokens,) in samples]
    name = "tokens" if samples[0][0].ndim == 1 else "images"
    return [{name: x, "classes": classes} for x, classes in samples]


def _of_transformers(module: nn.Module) -> nn.Module:
    """Return the model of transformers in a net, or else the net."""
    return module.net if isinstance(module, LanguageModel) else module


def with_hugging_face(net: Net, **options: Any) -> Result:
    from safetensors.torch import load_model
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Seeds(TrainerCallback):
        """Gives each worker dropout masks of its own; the Trainer gives all of them the same. Counts the steps."""

        steps = 0

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.steps += 1
            if state.global_step == 0:
                seed_worker(dist.get_rank())

    for half in range(2):
        module = net.module()
        ort = ORTModule(_of_transformers(module))
        sgd, seeds = optimizer_of(ort), Seeds()
        trainer = Trainer(
            ort,
            TrainingArguments(
                "output",
                max_steps=STEPS if half else HALF,
                per_device_train_batch_size=_size(),
                train_sampling_strategy="sequential",
                max_grad_norm=0.0,
                logging_steps=1,
                logging_nan_inf_filter=False,
                save_steps=HALF,
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
                **options,
            ),
            train_dataset=_as_rows(net),
            optimizers=(sgd, torch.optim.lr_scheduler.ConstantLR(sgd, 1.0)),
            callbacks=[seeds],
            # Models of transformers return their loss by name, the other nets return nothing else.
            compute_loss_func=None if net.make is LanguageModel else lambda loss, *_, **__: loss,
        )
        trainer.train(resume_from_checkpoint=bool(half))
        assert seeds.steps == HALF
        assert ort.report().runs_in_onnxruntime, str(ort.report())
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    file = Path(f"output/checkpoint-{HALF}/model.safetensors")
    saved = _read(net, lambda module: load_model(_of_transformers(module), file))
    return {"losses": losses, "state": module.state_dict(), "saved": saved}


def with_lightning(net: Net, sharded: bool = False, wrap: Wrap = ORTModule) -> Result:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    class Training(lightning.LightningModule):
        def __init__(self, random: torch.Tensor) -> None:
            super().__init__()
            self.net = net.module() if sharded else wrap(net.module())
            self.losses: list[torch.Tensor] = []
            self.random = random

        def configure_model(self) -> None:
            if sharded:
                self.net = wrap(fully_shard(self.net, mesh=self.device_mesh["data_parallel"]))

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            # Lightning saves no state of random numbers.
            torch.set_rng_state(self.random)
            loss = self.net(*batch)
            self.random = torch.get_rng_state()
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.net)

    seed_worker(dist.get_rank())
    random, losses = torch.get_rng_state(), []
    batches = net.batches()
    for half, part in enumerate((batches[:HALF], batches[HALF:])):
        training = Training(random)
        strategy: Any = DDPStrategy(process_group_backend="gloo")
        if sharded:
            # By default the workers of one machine share the work of each layer.
            sizes = {"data_parallel_size": dist.get_world_size(), "tensor_parallel_size": 1}
            strategy = ModelParallelStrategy(**sizes, process_group_backend="gloo")
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=dist.get_world_size(),
            strategy=strategy,
            # Its own sampler shuffles.
            use_distributed_sampler=False,
            max_epochs=half + 1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        # Half of the batches are an epoch: Lightning resumes at the start of an epoch.
        loader = _loader(_samples(part), DistributedSampler)
        trainer.fit(training, loader, ckpt_path="half.ckpt" if half else None)
        report = report_of(training.net)
        assert wrap is eager or report.runs_in_onnxruntime, str(report)
        losses += [mean_over_workers(loss.item()) for loss in training.losses]
        random = training.random
        if not half:
            trainer.save_checkpoint("half.ckpt")
    file = Path("half.ckpt")
    if sharded:
        file = Path(f"whole-{dist.get_rank()}.pt")
        dcp_to_torch_save("half.ckpt", file)
    state = {name.removeprefix("net."): value for name, value in torch.load(file)["state_dict"].items()}
    saved = _read(net, lambda module: module.load_state_dict(state))
    return {"losses": losses, "state": full_state(training.net), "saved": saved}


def with_lightning_sharded(net: Net) -> Result:
    """Return the training and, of a net with BatchNorm, that of the plain module.

    Each worker of `fully_shard` has running statistics of its own. PyTorch saves those of any one of them.
    """
    result = with_lightning(net, sharded=True)
    if any(True for _ in net.module().buffers()):
        result["beside"] = with_lightning(net, sharded=True, wrap=eager)
    return result


def refused_by_lightning() -> dict[str, str]:
    """Return what Lightning says to FSDP on the CPU."""
    import lightning

    try:
        lightning.Trainer(accelerator="cpu", devices=dist.get_world_size(), strategy="fsdp")
    except ValueError as error:
        return {"error": str(error)}
    return {"error": "none"}


TOOLS: dict[str, Callable[[Net], Result]] = {
    "accelerate": with_accelerate,
    "accelerate, FSDP2": lambda net: with_accelerate(net, fsdp_version=2),
    "hugging face": with_hugging_face,
    "hugging face, FSDP": lambda net: with_hugging_face(net, fsdp="full_shard"),
    "lightning": with_lightning,
    "lightning sharded": with_lightning_sharded,
}
