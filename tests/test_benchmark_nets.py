"""The nets of `benchmarks/steps/nets`: all train, and hand-written layers equal what their papers define."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from steps.nets import CASES, WithLoss, make_batch, make_net, unseen, unseen_sequences

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", [*unseen.NETS, *unseen_sequences.NETS, "bert-b1"])
@pytest.mark.thorough
def test_each_parameter_that_is_trained_gets_a_gradient(name: str) -> None:
    case = CASES[name]
    net = WithLoss(make_net(case), case.net.loss)
    inputs, target = make_batch(case)
    assert len(inputs) == case.batch
    loss = net(torch.from_numpy(inputs), torch.from_numpy(target))
    loss.backward()
    assert loss.isfinite()
    for key, parameter in net.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, key
            assert parameter.grad.isfinite().all(), key


def test_the_scan_in_blocks_is_the_recurrence() -> None:
    """h = exp(a) h + b x and y = c h, step by step."""
    torch.manual_seed(0)
    batch, length, heads, width, states = 2, 24, 3, 5, 4
    x = torch.randn(batch, length, heads, width, dtype=torch.float64)
    a = -torch.rand(batch, length, heads, dtype=torch.float64)
    b, c = torch.randn(2, batch, length, heads, states, dtype=torch.float64)
    hidden = torch.zeros(batch, heads, width, states, dtype=torch.float64)
    outputs = []
    for t in range(length):
        hidden = hidden * a[:, t, :, None, None].exp() + x[:, t, :, :, None] * b[:, t, :, None]
        outputs.append((hidden * c[:, t, :, None]).sum(-1))
    torch.testing.assert_close(unseen_sequences._scan(x, a, b, c, 8), torch.stack(outputs, 1))


def test_experts_with_room_for_all_are_a_sum_over_two() -> None:
    """Each expert on all tokens, and a capacity that no expert exceeds."""
    torch.manual_seed(0)
    experts = unseen_sequences._Experts(8, 16, 2)  # top 2 of 2: each expert takes all tokens
    x = torch.randn(2, 6, 8)
    shares = experts.router(x).softmax(-1)
    each = [functional.gelu(x @ experts.up[i]) @ experts.down[i] for i in range(2)]
    torch.testing.assert_close(experts(x), shares[..., :1] * each[0] + shares[..., 1:] * each[1])


def test_an_expert_drops_what_exceeds_its_capacity() -> None:
    torch.manual_seed(0)
    experts = unseen_sequences._Experts(8, 16, 8)
    with torch.no_grad():  # all tokens choose experts 0 and 1
        experts.router.weight.zero_()
        experts.router.weight[0], experts.router.weight[1] = 2.0, 1.0
    x = torch.rand(1, 16, 8) + 0.1
    alone = torch.cat([experts(x[:, i : i + 4].repeat_interleave(4, 1))[:, :1] for i in (0, 4)], 1)
    mixed = experts(x)
    capacity = 5 * 2 * 16 // (4 * 8)
    assert mixed[0, capacity:].count_nonzero() == 0
    torch.testing.assert_close(mixed[:, 0], alone[:, 0])


def test_graph_attention_is_a_softmax_over_neighbors() -> None:
    torch.manual_seed(0)
    nodes, layer = 9, unseen._GraphAttention(5, 4, 2)
    adjacency = (torch.rand(nodes, nodes) < 0.4) | torch.eye(nodes, dtype=torch.bool)
    target, source = adjacency.nonzero().unbind(1)
    x = torch.randn(nodes, 5)
    hidden = layer.dense(x).view(nodes, 2, 4)
    sent, received = (hidden * layer.sent).sum(-1), (hidden * layer.received).sum(-1)
    scores = functional.leaky_relu(received[:, None] + sent[None], 0.2)
    weights = scores.masked_fill(~adjacency[..., None], -torch.inf).softmax(1)
    dense = torch.einsum("nsh,shw->nhw", weights, hidden).flatten(1) + layer.bias
    torch.testing.assert_close(layer(x, source, target), dense)


def test_splines_are_those_of_de_boor() -> None:
    interpolate = pytest.importorskip("scipy.interpolate")
    layer = unseen._KanLayer(3, 4)
    x = torch.rand(50, 3) * 2 - 1
    knots = layer.grid[0].numpy().astype(np.float64)
    expected = interpolate.BSpline.design_matrix(x.flatten().numpy().astype(np.float64), knots, 3).toarray()
    np.testing.assert_allclose(layer._bases(x).reshape(150, -1).numpy(), expected, atol=1e-5)


def test_shifted_windows_attend_within_regions_only() -> None:
    """A change of one position changes its own shifted window, not what the shift has brought beside it."""
    torch.manual_seed(0)
    block = unseen._SwinBlock(8, 2, 8, 2)
    block.dense = torch.nn.Identity()
    x = torch.randn(1, 8, 8, 8)
    changed = x.clone()
    changed[0, 0, 0] = torch.randn(8)
    different = (block(x) != block(changed)).any(-1)[0].nonzero()
    # The shifted windows begin at rows and columns 2 and 6: position (0, 0) is in a window with rows 6 to 1.
    assert different.max() <= 1
    assert len(different) == 4


def test_ppo_is_the_clipped_surrogate_of_a_categorical_policy() -> None:
    case = CASES["ppo"]
    net, x = make_net(case), torch.from_numpy(make_batch(case)[0]).double()
    net.double()
    policy = torch.distributions.Categorical(logits=net.actor(x[:, :24]))
    ratio = (policy.log_prob(x[:, 24]) - x[:, 25]).exp()
    clipped = torch.where(x[:, 26] > 0, ratio.clamp(max=1.2), ratio.clamp(min=0.8))
    error = functional.mse_loss(net.critic(x[:, :24])[:, 0], x[:, 27], reduction="none")
    torch.testing.assert_close(net(x)[:, 0], 0.5 * error - clipped * x[:, 26] - 0.01 * policy.entropy())


def test_rendering_is_the_product_of_what_is_let_through() -> None:
    case = CASES["nerf"]
    net, x = make_net(case).double(), torch.from_numpy(make_batch(case)[0][:4]).double()
    found: list[torch.Tensor] = []
    net.head.register_forward_hook(lambda *call: found.append(call[-1]))
    rendered = net(x)
    color, density = found[0][..., :3].sigmoid(), functional.softplus(found[0][..., 3])
    opacity = 1 - torch.exp(-density / net.SAMPLES)
    through = torch.ones(4, dtype=torch.float64)
    expected = torch.zeros(4, 3, dtype=torch.float64)
    for sample in range(net.SAMPLES):
        expected = expected + (through * opacity[:, sample])[:, None] * color[:, sample]
        through = through * (1 - opacity[:, sample])
    torch.testing.assert_close(rendered, expected)
