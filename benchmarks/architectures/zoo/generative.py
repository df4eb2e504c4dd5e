"""Diffusion, normalising flows, differential equations and Kolmogorov-Arnold networks."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers
import kan
import nflows.distributions
import nflows.flows
import nflows.nn.nets
import nflows.transforms
import normflows
import torch
import torchdiffeq
from torch import nn

from zoo.architecture import Batch, architecture


def _noisy(channels: int = 3, size: int = 16, width: int | None = None) -> list[Batch]:
    batches: list[Batch] = []
    for b in (2, 3):
        batches.append({"sample": torch.randn(b, channels, size, size), "timestep": torch.arange(b) * 10 + 5})
        if width:
            batches[-1]["encoder_hidden_states"] = torch.randn(b, 5, width)
    return batches


_BLOCKS = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4, "sample_size": 16}
architecture(
    "diffusers/UNet2DModel",
    partial(
        diffusers.UNet2DModel,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
        **_BLOCKS,
    ),
    _noisy,
)
architecture(
    "diffusers/UNet2DConditionModel",
    partial(
        diffusers.UNet2DConditionModel,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=12,
        attention_head_dim=4,
        **_BLOCKS,
    ),
    partial(_noisy, 4, 16, 12),
)
architecture(
    "diffusers/AutoencoderKL",
    partial(
        diffusers.AutoencoderKL,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        **_BLOCKS,
    ),
    lambda: [{"sample": torch.randn(b, 3, 16, 16)} for b in (2, 3)],
)
architecture(
    "diffusers/VQModel",
    partial(
        diffusers.VQModel,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        num_vq_embeddings=8,
        **_BLOCKS,
    ),
    lambda: [{"sample": torch.randn(b, 3, 16, 16)} for b in (2, 3)],
)
architecture(
    "diffusers/DiTTransformer2DModel",
    partial(
        diffusers.DiTTransformer2DModel,
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=3,
        out_channels=3,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        norm_num_groups=4,
        num_embeds_ada_norm=10,
    ),
    lambda: [
        {
            "hidden_states": torch.randn(b, 3, 8, 8),
            "timestep": torch.arange(b),
            "class_labels": torch.arange(b),
        }
        for b in (2, 3)
    ],
)
architecture(
    "diffusers/SD3Transformer2DModel",
    partial(
        diffusers.SD3Transformer2DModel,
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_projection_dim=16,
        joint_attention_dim=12,
        pooled_projection_dim=6,
        out_channels=4,
        pos_embed_max_size=8,
    ),
    lambda: [
        {
            "hidden_states": torch.randn(b, 4, 8, 8),
            "encoder_hidden_states": torch.randn(b, 5, 12),
            "pooled_projections": torch.randn(b, 6),
            "timestep": torch.arange(b) + 3,
        }
        for b in (2, 3)
    ],
)
architecture(
    "diffusers/FluxTransformer2DModel",
    partial(
        diffusers.FluxTransformer2DModel,
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=12,
        pooled_projection_dim=6,
        axes_dims_rope=(4, 4, 8),
    ),
    lambda: [
        {
            "hidden_states": torch.randn(b, 9, 4),
            "encoder_hidden_states": torch.randn(b, 5, 12),
            "pooled_projections": torch.randn(b, 6),
            "timestep": torch.rand(b),
            "img_ids": torch.randint(3, (9, 3)).float(),
            "txt_ids": torch.zeros(5, 3),
        }
        for b in (2, 3)
    ],
)
architecture(
    "diffusers/UNet1DModel",
    partial(
        diffusers.UNet1DModel,
        sample_size=16,
        block_out_channels=(8, 8, 16),
        in_channels=4,
        out_channels=4,
        time_embedding_type="positional",
        down_block_types=("DownResnetBlock1D",) * 3,
        up_block_types=("UpResnetBlock1D",) * 2,
        mid_block_type="MidResTemporalBlock1D",
        out_block_type="OutConv1DBlock",
        use_timestep_embedding=True,
        act_fn="mish",
        layers_per_block=1,
    ),
    lambda: [{"sample": torch.randn(b, 4, 16), "timestep": torch.arange(b)} for b in (2, 3)],
)
architecture(
    "diffusers/PixArtTransformer2DModel",
    partial(
        diffusers.PixArtTransformer2DModel,
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        cross_attention_dim=16,
        caption_channels=12,
        use_additional_conditions=False,
    ),
    lambda: [
        {
            "hidden_states": torch.randn(b, 4, 8, 8),
            "encoder_hidden_states": torch.randn(b, 5, 12),
            "timestep": torch.arange(b),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        }
        for b in (2, 3)
    ],
)


class Likelihood(nn.Module):
    """The log likelihood under a flow."""

    def __init__(self, flow: nn.Module) -> None:
        super().__init__()
        self.flow = flow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.flow.log_prob(x)  # type: ignore[no-any-return, operator]


def _points() -> list[Batch]:
    return [{"x": torch.randn(b, 4)} for b in (5, 6)]


def _nflow(*transforms: Any) -> nn.Module:
    composite = nflows.transforms.CompositeTransform([t() for t in transforms])
    return Likelihood(nflows.flows.Flow(composite, nflows.distributions.StandardNormal([4])))


_net = lambda i, o: nflows.nn.nets.ResidualNet(i, o, hidden_features=8, num_blocks=1)
_mask = [1, 0, 1, 0]
_T = nflows.transforms
for _name, _transforms in {
    "MaskedAffineAutoregressive": (
        lambda: _T.ReversePermutation(4),
        partial(_T.MaskedAffineAutoregressiveTransform, 4, 8),
    ),
    "RationalQuadraticCoupling": (
        partial(
            _T.PiecewiseRationalQuadraticCouplingTransform,
            _mask,
            _net,
            tails="linear",
            num_bins=4,
            tail_bound=3.0,
        ),
        partial(_T.LULinear, 4),
    ),
    "RationalQuadraticAutoregressive": (
        partial(
            _T.MaskedPiecewiseRationalQuadraticAutoregressiveTransform,
            4,
            8,
            tails="linear",
            num_bins=4,
            tail_bound=3.0,
        ),
    ),
    "AffineCoupling": (partial(_T.AffineCouplingTransform, _mask, _net), lambda: _T.BatchNorm(4)),
    "SVDLinear": (partial(_T.SVDLinear, 4, 2), partial(_T.AffineCouplingTransform, _mask, _net)),
    "QRLinear": (partial(_T.QRLinear, 4, 2), partial(_T.AdditiveCouplingTransform, _mask, _net)),
    "ActNorm": (partial(_T.ActNorm, 4), partial(_T.AffineCouplingTransform, _mask, _net)),
    "NaiveLinear": (partial(_T.NaiveLinear, 4), partial(_T.AffineCouplingTransform, _mask, _net)),
}.items():
    architecture(f"nflows/{_name}", partial(_nflow, *_transforms), _points)


def _normflow(kind: str) -> nn.Module:
    base = normflows.distributions.base.DiagGaussian(4)
    flows: list[nn.Module] = []
    for _ in range(2):
        if kind == "RealNVP":
            flows += [
                normflows.flows.AffineCouplingBlock(normflows.nets.MLP([2, 8, 4], init_zeros=True)),
                normflows.flows.Permute(4, mode="swap"),
            ]
        elif kind == "Planar":
            flows.append(normflows.flows.Radial((4,)))
        elif kind == "Residual":
            net = normflows.nets.LipschitzMLP([4, 8, 4], init_zeros=True, lipschitz_const=0.9)
            flows.append(normflows.flows.Residual(net, reduce_memory=False))
        else:
            flows += [
                normflows.flows.AutoregressiveRationalQuadraticSpline(4, 1, 8),
                normflows.flows.LULinearPermute(4),
            ]
    return Likelihood(normflows.NormalizingFlow(base, flows))


for _name in ("RealNVP", "NeuralSpline"):
    architecture(f"normflows/{_name}", partial(_normflow, _name), _points)


class Dynamics(nn.Module):
    """The right-hand side of a differential equation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, t: torch.Tensor, x: torch.Tensor) -> Any:
        return self.layers(x) + torch.sin(t)


class NeuralODE(nn.Module):
    """A neural differential equation, solved by a method of torchdiffeq."""

    def __init__(self, method: str, adjoint: bool = False) -> None:
        super().__init__()
        self.dynamics = Dynamics()
        self.method, self.adjoint = method, adjoint

    def forward(self, x: torch.Tensor) -> Any:
        times = torch.linspace(0, 1, 4, dtype=x.dtype)
        solve = torchdiffeq.odeint_adjoint if self.adjoint else torchdiffeq.odeint
        return solve(self.dynamics, x, times, method=self.method, rtol=1e-4, atol=1e-4)


for _method in ("euler", "midpoint", "rk4", "explicit_adams", "dopri5"):
    architecture(f"torchdiffeq/{_method}", partial(NeuralODE, _method), _points)
architecture("torchdiffeq/rk4_adjoint", partial(NeuralODE, "rk4", True), _points)


architecture(
    "pykan/KAN",
    lambda: kan.KAN(width=[4, 3, 2], grid=3, k=3, seed=0, auto_save=False, symbolic_enabled=False),
    lambda: [{"x": torch.rand(b, 4) * 2 - 1} for b in (6, 7)],
)
