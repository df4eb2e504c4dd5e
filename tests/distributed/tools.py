"""Trainings by tools that bring their own loop, started by torchrun: accelerate, Hugging Face's Trainer, Lightning."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from distributed.engines import full_state, mean_over_workers
from distributed.nets import BATCH, NETS, STEPS, Result, optimizer_of
from onnxtrain.ortmodule import ORTModule

NET = NETS["gpt2"]


def _samples() -> torch.Tensor:
    """Return the samples of all batches in their order."""
    (tokens,) = (torch.cat(parts) for parts in zip(*NET.batches(), strict=True))
    return tokens


def _size() -> int:
    """Return how many samples of a batch are this worker's."""
    return BATCH // dist.get_world_size()


def _without_first(tokens: torch.Tensor) -> torch.Tensor:
    """Return labels of which the first one is ignored."""
    return torch.cat([torch.full_like(tokens[:1], -100), tokens[1:]])


def with_accelerate(fsdp_version: int | None = None) -> Result:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = None if fsdp_version is None else FullyShardedDataParallelPlugin(fsdp_version=fsdp_version)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    assert accelerator.num_processes == dist.get_world_size()
    # On the CPU it takes no notice of the plugin.
    assert accelerator.distributed_type == "MULTI_CPU"
    ort = ORTModule(NET.module())
    model, optimizer, loader = accelerator.prepare(
        ort, optimizer_of(ort), DataLoader(TensorDataset(_samples()), _size())
    )
    losses = []
    for (tokens,) in loader:
        optimizer.zero_grad()
        loss = model(tokens)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    assert accelerator.unwrap_model(model) is ort
    assert ort.report().runs_in_onnxruntime, str(ort.report())
    accelerator.save_state("accelerate-state")
    saved = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.wait_for_everyone()
    accelerator.load_state("accelerate-state")
    assert all(torch.equal(value, saved[name]) for name, value in ort.state_dict().items())
    return {"losses": losses, "state": saved}


def with_hugging_face(**options: Any) -> Result:
    from transformers import Trainer, TrainingArguments

    module = NET.module()
    ort = ORTModule(module.net)
    sgd = optimizer_of(ort)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            ort,
            TrainingArguments(
                folder,
                max_steps=STEPS,
                per_device_train_batch_size=_size(),
                train_sampling_strategy="sequential",
                max_grad_norm=0.0,
                logging_steps=1,
                logging_nan_inf_filter=False,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
                **options,
            ),
            # The Trainer divides by the number of labels, of which the model shifts the first one away.
            train_dataset=[{"input_ids": row, "labels": _without_first(row)} for row in _samples()],
            optimizers=(sgd, torch.optim.lr_scheduler.ConstantLR(sgd, 1.0)),
        )
        trainer.train()
    assert ort.report().runs_in_onnxruntime, str(ort.report())
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return {"losses": losses, "state": module.state_dict()}


def with_lightning(sharded: bool = False) -> Result:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    class Training(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = NET.module() if sharded else ORTModule(NET.module())
            self.losses: list[torch.Tensor] = []

        def configure_model(self) -> None:
            if sharded:
                self.net = ORTModule(fully_shard(self.net, mesh=self.device_mesh["data_parallel"]))

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = self.net(*batch)
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.net)

    training = Training()
    strategy: Any = DDPStrategy(process_group_backend="gloo")
    if sharded:
        # By default the workers of one machine share the work of each layer.
        sizes = {"data_parallel_size": dist.get_world_size(), "tensor_parallel_size": 1}
        strategy = ModelParallelStrategy(**sizes, process_group_backend="gloo")
    data = TensorDataset(_samples())
    in_order = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=_size(), sampler=in_order)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=dist.get_world_size(),
            strategy=strategy,
            use_distributed_sampler=False,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(training, loader)
    assert training.net.report().runs_in_onnxruntime, str(training.net.report())
    losses = [mean_over_workers(loss.item()) for loss in training.losses]
    return {"losses": losses, "state": full_state(training.net)}


def refused_by_lightning() -> dict[str, str]:
    """Return what Lightning says to FSDP on the CPU."""
    import lightning

    try:
        lightning.Trainer(accelerator="cpu", devices=dist.get_world_size(), strategy="fsdp")
    except ValueError as error:
        return {"error": str(error)}
    return {"error": "none"}


TOOLS = {
    "accelerate": with_accelerate,
    "accelerate, FSDP2": lambda: with_accelerate(fsdp_version=2),
    "hugging face": with_hugging_face,
    "hugging face, FSDP": lambda: with_hugging_face(fsdp="full_shard"),
    "lightning": with_lightning,
    "lightning sharded": lambda: with_lightning(sharded=True),
}
