"""Networks for pictures: torchvision, timm, vit-pytorch and segmentation-models-pytorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import timm
import torch
import torchvision
import vit_pytorch
from torch import nn

from zoo.architecture import Batch, architecture

import segmentation_models_pytorch  # isort: skip  (imports torchvision)


def _pictures(size: int, name: str = "x", channels: int = 3, count: int = 4) -> Callable[[], list[Batch]]:
    return lambda: [{name: torch.randn(b, channels, size, size)} for b in (count, count + 1)]


def _torchvision(name: str, size: int, **settings: Any) -> None:
    make = partial(torchvision.models.get_model, name, weights=None, **settings)
    architecture(f"torchvision/{name}", make, _pictures(size))


for _name in (
    "resnet18",
    "resnext50_32x4d",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "shufflenet_v2_x0_5",
    "squeezenet1_1",
    "regnet_y_400mf",
    "efficientnet_b0",
    "densenet121",
    "mnasnet0_5",
):
    _torchvision(_name, 64, num_classes=5)
_torchvision("alexnet", 64, num_classes=5)
_torchvision("swin_t", 32, num_classes=5)
for _name in ("deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"):
    architecture(
        f"torchvision/{_name}",
        partial(torchvision.models.get_model, _name, weights=None, weights_backbone=None, num_classes=3),
        _pictures(64, "x" if "lraspp" not in _name else "input"),
    )
architecture(
    "torchvision/r3d_18",
    partial(torchvision.models.get_model, "r3d_18", weights=None, num_classes=3),
    lambda: [{"x": torch.randn(b, 3, 4, 32, 32)} for b in (2, 3)],
)

for _name, _size in {
    "efficientnet_lite0": 64,
    "convmixer_768_32": 32,
    "ghostnet_050": 64,
    "res2net50_26w_4s": 64,
    "dla34": 64,
    "eca_nfnet_l0": 64,
    "fbnetc_100": 64,
    "lcnet_050": 64,
    "mobileone_s0": 64,
    "repvgg_a0": 64,
    "edgenext_xx_small": 64,
    "mobilenetv4_conv_small": 64,
    "skresnet18": 64,
    "legacy_seresnet18": 64,
    "inception_next_tiny": 64,
    "starnet_s1": 64,
    "repghostnet_050": 64,
    "xcit_nano_12_p16_224": 224,
    "pit_ti_224": 224,
}.items():
    if timm.is_model(_name):
        architecture(
            f"timm/{_name}",
            partial(timm.create_model, _name, pretrained=False, num_classes=5),
            _pictures(_size, count=2 if _size > 100 else 4),
        )

_VIT = {"image_size": 32, "patch_size": 8, "num_classes": 3, "dim": 16, "depth": 2, "heads": 2, "mlp_dim": 24}


def _vit(name: str, module: str, cls: str, **settings: Any) -> None:
    def make() -> nn.Module:
        __import__(f"vit_pytorch.{module}")
        made: nn.Module = getattr(getattr(vit_pytorch, module), cls)(**settings)
        return made

    architecture(f"vit-pytorch/{name}", make, lambda: [{"img": torch.randn(b, 3, 32, 32)} for b in (2, 3)])


_vit("simple_vit", "simple_vit", "SimpleViT", **_VIT)
_vit("deepvit", "deepvit", "DeepViT", **_VIT)


for _name in ("Unet", "FPN", "PSPNet", "MAnet"):
    architecture(
        f"segmentation-models/{_name}",
        partial(getattr(segmentation_models_pytorch, _name), "resnet18", encoder_weights=None, classes=2),
        _pictures(64),
    )
