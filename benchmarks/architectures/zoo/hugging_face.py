"""Models of Hugging Face transformers, from tiny configurations with random weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from zoo.architecture import Batch, architecture

TOKENS = 99
SMALL: dict[str, Any] = {
    "vocab_size": TOKENS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
"""Given to every configuration that has a setting of the name."""

ENCODER_DECODER: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}


def config(kind: str, **settings: Any) -> Any:
    """Returns a tiny configuration of this model type."""
    cls = CONFIG_MAPPING[kind]
    known = cls()
    common = {
        name: value
        for name, value in (SMALL | EXPERTS).items()
        if hasattr(known, name)
        and name not in _FIXED.get(kind, ())
        and cls.attribute_map.get(name) not in settings
    }
    return cls(**(common | settings))


_FIXED = dict.fromkeys(("funnel", "prophetnet"), ("num_hidden_layers",)) | {
    "xlnet": ("max_position_embeddings",)
}
"""Settings that a configuration has and refuses to be given."""


def made(head: str, kind: str, settings: dict[str, Any]) -> nn.Module:
    cls: Any = getattr(transformers, head)
    own = config(kind, **{name: value() if callable(value) else value for name, value in settings.items()})
    return cls.from_config(own) if head.startswith("AutoModel") else cls(own)


def ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, TOKENS, (batch, length))


def padding(batch: int, length: int) -> torch.Tensor:
    """Ones where there is a token: the sequences get shorter by one from row to row."""
    return (torch.arange(length) < torch.arange(length, length - batch, -1)[:, None]).long()


def text(length: int = 8, mask: bool = True) -> list[Batch]:
    batches = []
    for batch, n in ((2, length), (3, length)):
        tokens = ids(batch, n)
        batches.append({"input_ids": tokens, "labels": tokens})
        if mask:
            batches[-1]["attention_mask"] = padding(batch, n)
    return batches


def classified(length: int = 8) -> list[Batch]:
    return [
        {"input_ids": ids(b, length), "attention_mask": padding(b, length), "labels": torch.arange(b) % 2}
        for b in (2, 3)
    ]


def pairs() -> list[Batch]:
    return [{"input_ids": ids(b, 8), "attention_mask": padding(b, 8), "labels": ids(b, 6)} for b in (2, 3)]


def pictures(size: int = 32, labels: bool = True) -> list[Batch]:
    batches: list[Batch] = [{"pixel_values": torch.randn(b, 3, size, size)} for b in (2, 3)]
    return [
        batch | {"labels": torch.arange(len(batch["pixel_values"])) % 2} if labels else batch
        for batch in batches
    ]


def maps(size: int = 32) -> list[Batch]:
    return [
        batch | {"labels": torch.randint(2, (b, size, size))}
        for b, batch in zip((2, 3), pictures(size, False), strict=True)
    ]


def waves(samples: int = 800, labels: bool = True) -> list[Batch]:
    batches: list[Batch] = [{"input_values": torch.randn(b, samples)} for b in (2, 3)]
    return [
        batch | {"labels": torch.arange(len(batch["input_values"])) % 2} if labels else batch
        for batch in batches
    ]


def spoken(samples: int = 1600) -> list[Batch]:
    """For connectionist temporal classification."""
    return [{"input_values": torch.randn(b, samples), "labels": torch.randint(1, 20, (b, 2))} for b in (2, 3)]


def _add(
    head: str, batches: Callable[[], list[Batch]], *kinds: str, suffix: str = "", **settings: Any
) -> None:
    for kind in kinds:
        architecture(f"transformers/{kind}{suffix}", partial(made, head, kind, settings), batches)


CAUSAL = partial(_add, "AutoModelForCausalLM", text)
CAUSAL(
    "gpt2", "gpt_neox", "opt", "llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma2",
    "gemma3_text", "phi", "phi3", "stablelm", "starcoder2", "olmo", "olmo2", "olmoe", "cohere", "granite",
    "persimmon", "diffllama", "nemotron", "smollm3", "biogpt", "gpt_bigcode", "seed_oss",
)  # fmt: skip
CAUSAL("qwen2_moe", "qwen3_moe", decoder_sparse_step=1, shared_expert_intermediate_size=24)
CAUSAL("granitemoe", "phimoe")
CAUSAL("glm", "glm4", "ernie4_5", "helium", head_dim=8)
CAUSAL("gptj", "codegen", rotary_dim=4)
CAUSAL(
    "gpt_neo", hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
    window_size=4,
)  # fmt: skip
CAUSAL("bloom", n_head=4, n_layer=2)
CAUSAL("falcon", alibi=False, new_decoder_architecture=True)
CAUSAL("mpt", d_model=32, n_heads=4, n_layers=2)
CAUSAL("ctrl", n_embd=32, n_layer=2, n_head=4, dff=48)
CAUSAL("xglm", d_model=32, num_layers=2, attention_heads=4, ffn_dim=48)
CAUSAL("gpt_oss", head_dim=8)
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
CAUSAL(
    "deepseek_v2", first_k_dense_replace=1, n_group=1, topk_group=1, topk_method="greedy",
    num_key_value_heads=4, **MLA,
)  # fmt: skip
CAUSAL("deepseek_v3", first_k_dense_replace=1, n_group=2, topk_group=2, num_key_value_heads=4, **MLA)
CAUSAL("llama4_text", intermediate_size_mlp=48, interleave_moe_layer_step=1, head_dim=8)
CAUSAL("mamba", "falcon_mamba", state_size=4, time_step_rank=4)
CAUSAL("mamba2", num_heads=8, head_dim=8, state_size=8, n_groups=2, chunk_size=4)
CAUSAL(
    "jamba", mamba_d_state=4, mamba_dt_rank=4, attn_layer_period=2, attn_layer_offset=1,
    expert_layer_period=2, expert_layer_offset=1, use_mamba_kernels=False,
)  # fmt: skip
CAUSAL(
    "bamba", mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=2, mamba_chunk_size=4,
    attn_layer_indices=[1],
)  # fmt: skip
CAUSAL("recurrent_gemma", lru_width=32, num_hidden_layers=3, attention_window_size=8)
CAUSAL("rwkv", attention_hidden_size=32, context_length=64)
CAUSAL("lfm2", block_ff_dim=48, layer_types=["conv", "full_attention"])
CAUSAL(
    "qwen3_next", linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
    linear_value_head_dim=8, head_dim=8, layer_types=["linear_attention", "full_attention"],
    shared_expert_intermediate_size=24,
)  # fmt: skip
_add("XLNetLMHeadModel", partial(text, mask=False), "xlnet", d_model=32, n_layer=2, n_head=4, d_inner=48)

MASKED = partial(_add, "AutoModelForMaskedLM", text)
MASKED(
    "bert", "roberta", "electra", "mpnet", "rembert", "roformer", "camembert", "layoutlm", "megatron-bert",
    "ernie", "xlm-roberta", "modernbert", "nystromformer", "yoso",
)  # fmt: skip
MASKED("albert", embedding_size=16)
MASKED("distilbert", dim=32, n_layers=2, n_heads=4, hidden_dim=48)
MASKED(
    "deberta", "deberta-v2", relative_attention=True, pos_att_type=["p2c", "c2p"], max_relative_positions=16
)
MASKED("convbert", embedding_size=32, num_groups=2, conv_kernel_size=3)
MASKED("mobilebert", embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16)
MASKED("ibert")
MASKED("squeezebert", embedding_size=32)
MASKED("xlm", emb_dim=32, n_layers=2, n_heads=4)
_add("AutoModelForMaskedLM", partial(text, mask=False), "fnet", type_vocab_size=2)
_add("AutoModelForMaskedLM", partial(text, 16), "longformer", attention_window=4)
_add(
    "AutoModelForMaskedLM", partial(text, 64), "big_bird", attention_type="block_sparse", block_size=4,
    num_random_blocks=2, max_position_embeddings=128,
)  # fmt: skip
_add("AutoModelForMaskedLM", partial(text, 16), "mra", max_position_embeddings=16)
_add(
    "AutoModelForMaskedLM", text, "esm", mask_token_id=3, position_embedding_type="rotary",
    token_dropout=False,
)  # fmt: skip
_add(
    "AutoModelForSequenceClassification", classified, "funnel", d_model=32, n_head=4, d_head=8, d_inner=48,
    block_sizes=[1, 1],
)  # fmt: skip
_add(
    "AutoModelForSequenceClassification", partial(classified, 16), "canine", num_hash_buckets=64,
    local_transformer_stride=8, downsampling_rate=4,
)  # fmt: skip
_add(
    "ReformerModelWithLMHead", partial(text, 16), "reformer", hidden_size=32, attn_layers=["local", "lsh"],
    num_buckets=2, axial_pos_shape=[4, 4], axial_pos_embds_dim=[16, 16], is_decoder=True,
    local_attn_chunk_length=4, lsh_attn_chunk_length=4, feed_forward_size=48, attention_head_size=8,
    hash_seed=0,
)  # fmt: skip

SEQ2SEQ = partial(_add, "AutoModelForSeq2SeqLM", pairs)
SEQ2SEQ(
    "bart", "mbart", "pegasus", "marian", "blenderbot", "blenderbot-small", "m2m_100", "plbart",
    **ENCODER_DECODER,
)  # fmt: skip
SEQ2SEQ("t5", "umt5", "mt5", decoder_start_token_id=1, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
SEQ2SEQ(
    "longt5", decoder_start_token_id=1, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, local_radius=3
)
SEQ2SEQ(
    "switch_transformers", decoder_start_token_id=1, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
    num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
)  # fmt: skip
SEQ2SEQ("led", attention_window=4, **ENCODER_DECODER)
SEQ2SEQ(
    "prophetnet", num_encoder_layers=2, num_decoder_layers=2, num_encoder_attention_heads=4,
    num_decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
)  # fmt: skip


VISION = partial(_add, "AutoModelForImageClassification", pictures)
VISION("vit", "vit_msn", "beit", "data2vec-vision", "dinov2", image_size=32, patch_size=8)
VISION(
    "swin", "swinv2", image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=4
)
VISION("convnext", "convnextv2", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2)
VISION("resnet", "regnet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
VISION("bit", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_groups=2)
VISION("mobilenet_v1", "mobilenet_v2", depth_multiplier=0.25, min_depth=8)
VISION("mobilevit", image_size=32, hidden_sizes=[16, 16, 16], neck_hidden_sizes=[4, 4, 8, 8, 8, 8, 16])
_add(
    "AutoModelForImageClassification", partial(pictures, 64), "mobilevitv2", image_size=64,
    width_multiplier=0.25,
)  # fmt: skip
_add(
    "LevitForImageClassification", partial(pictures, 64), "levit", image_size=64, hidden_sizes=[16, 24, 32],
    num_attention_heads=[2, 2, 2], depths=[1, 1, 1], key_dim=[4, 4, 4],
)  # fmt: skip
_add("DeiTForImageClassification", pictures, "deit", image_size=32, patch_size=8)
VISION("efficientnet", image_size=32, width_coefficient=0.25, depth_coefficient=0.3, hidden_dim=320)
VISION("cvt")
VISION(
    "pvt", image_size=32, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4],
    num_hidden_layers=4,
)  # fmt: skip
VISION(
    "pvt_v2", image_size=32, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1],
    num_attention_heads=[1, 2, 2, 4], num_hidden_layers=4,
)  # fmt: skip
VISION("poolformer", hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1])
VISION(
    "focalnet", image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], hidden_sizes=[8, 16],
    focal_levels=[2, 2], focal_windows=[3, 3],
)  # fmt: skip
_add(
    "AutoModelForImageClassification", partial(pictures, 64), "hiera", image_size=[64, 64], embed_dim=8,
    depths=[1, 1, 1], num_heads=[1, 2, 4], masked_unit_size=[4, 4], num_query_pool=2,
)  # fmt: skip
_add(
    "AutoModelForPreTraining", partial(pictures, 32, False), "vit_mae", image_size=32, patch_size=8,
    decoder_hidden_size=16, decoder_num_hidden_layers=1, decoder_num_attention_heads=2,
    decoder_intermediate_size=24,
)  # fmt: skip
_add(
    "AutoModelForSemanticSegmentation", maps, "segformer", hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1],
    num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=16,
)  # fmt: skip
_add(
    "AutoModelForSemanticSegmentation",
    maps,
    "upernet",
    hidden_size=16,
    pool_scales=[1, 2],
    auxiliary_in_channels=16,
    auxiliary_channels=8,
    backbone_config=lambda: config(
        "convnext",
        hidden_sizes=[8, 16, 16, 32],
        depths=[1] * 4,
        num_stages=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    ),
)
_add(
    "AutoModelForDepthEstimation", partial(pictures, 32, False), "dpt", image_size=32, patch_size=8,
    num_hidden_layers=4, backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 8, 16, 16],
    fusion_hidden_size=8, readout_type="project",
)  # fmt: skip
_add(
    "AutoModelForDepthEstimation", partial(pictures, 64, False), "glpn", hidden_sizes=[8, 8, 16, 16],
    depths=[1] * 4, num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=8,
)  # fmt: skip
_add(
    "AutoModelForVideoClassification",
    lambda: [{"pixel_values": torch.randn(b, 4, 3, 16, 16), "labels": torch.arange(b) % 2} for b in (2, 3)],
    "timesformer",
    "videomae",
    image_size=16,
    patch_size=8,
    num_frames=4,
)
_add(
    "AutoModelForVideoClassification",
    lambda: [{"pixel_values": torch.randn(b, 4, 3, 16, 16), "labels": torch.arange(b) % 2} for b in (2, 3)],
    "vivit",
    image_size=16,
    tubelet_size=[2, 8, 8],
    num_frames=4,
)
_add(
    "Swin2SRForImageSuperResolution",
    lambda: [{"pixel_values": torch.randn(b, 3, 16, 16)} for b in (1, 2)],
    "swin2sr",
    image_size=16,
    embed_dim=12,
    depths=[1, 1],
    num_heads=[2, 2],
    window_size=4,
)


def boxes(size: int = 64) -> list[Batch]:
    labels = [{"class_labels": torch.tensor([0, 1]), "boxes": torch.rand(2, 4) * 0.4 + 0.2} for _ in range(2)]
    return [{"pixel_values": torch.randn(2, 3, size, size), "labels": labels} for _ in range(2)]


BACKBONE = lambda: config(
    "resnet",
    embedding_size=8,
    hidden_sizes=[8, 8, 16, 16],
    depths=[1] * 4,
    out_features=["stage2", "stage3", "stage4"],
)
DETR = {
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "backbone_config": BACKBONE,
    "num_queries": 6,
    **ENCODER_DECODER,
}
OBJECTS = partial(
    _add,
    "AutoModelForObjectDetection",
    lambda: [{key: value for key, value in batch.items() if key != "labels"} for batch in boxes()],
)
OBJECTS("detr", "conditional_detr", "table-transformer", **DETR)
OBJECTS("deformable_detr", num_feature_levels=3, encoder_n_points=2, decoder_n_points=2, **DETR)
_add(
    "AutoModelForObjectDetection", partial(pictures, 32, False), "yolos", image_size=[32, 32], patch_size=8,
    num_detection_tokens=4,
)  # fmt: skip

AUDIO = {
    "conv_dim": [16, 16, 16],
    "conv_stride": [5, 4, 4],
    "conv_kernel": [10, 4, 4],
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_length": 2,
    "mask_feature_length": 2,
}
_add(
    "AutoModelForAudioClassification", waves, "wav2vec2", "hubert", "wavlm", "unispeech", "unispeech-sat",
    "data2vec-audio", classifier_proj_size=16, **AUDIO,
)  # fmt: skip
_add(
    "AutoModelForAudioClassification", waves, "sew", "sew-d", squeeze_factor=2, classifier_proj_size=16,
    **AUDIO,
)  # fmt: skip
_add("Wav2Vec2ForCTC", spoken, "wav2vec2", suffix="-ctc", **AUDIO)
_add(
    "AutoModelForAudioClassification",
    lambda: [{"input_values": torch.randn(b, 32, 16), "labels": torch.arange(b) % 2} for b in (2, 3)],
    "audio-spectrogram-transformer",
    patch_size=8,
    max_length=32,
    num_mel_bins=16,
    frequency_stride=8,
    time_stride=8,
)
_add(
    "AutoModelForSpeechSeq2Seq",
    lambda: [{"input_features": torch.randn(b, 16, 40), "labels": ids(b, 5)} for b in (2, 3)],
    "whisper",
    num_mel_bins=16,
    max_source_positions=20,
    max_target_positions=16,
    **ENCODER_DECODER,
)
_add(
    "AutoModelForSpeechSeq2Seq",
    lambda: [{"input_features": torch.randn(b, 40, 16), "labels": ids(b, 5)} for b in (2, 3)],
    "speech_to_text",
    input_feat_per_channel=16,
    max_source_positions=40,
    max_target_positions=16,
    conv_channels=16,
    **ENCODER_DECODER,
)
_add(
    "AutoModel",
    lambda: [{"input_values": torch.randn(b, 1, 320)} for b in (1, 2)],
    "encodec",
    num_filters=4,
    codebook_size=16,
    codebook_dim=8,
    hidden_size=8,
    upsampling_ratios=[4, 2],
)


def _text_and_pictures() -> list[Batch]:
    return [
        {"input_ids": ids(b, 6), "attention_mask": padding(b, 6), "pixel_values": torch.randn(b, 3, 16, 16)}
        for b in (2, 3)
    ]


def _two_towers(kind: str) -> nn.Module:
    cls = CONFIG_MAPPING[kind]
    towers = cls().sub_configs
    text_settings = {**SMALL, "projection_dim": 16}
    vision_settings = {**SMALL, "image_size": 16, "patch_size": 8, "projection_dim": 16}
    own = cls(text_config=text_settings, vision_config=vision_settings, projection_dim=16)
    assert towers
    own.return_loss = True
    return transformers.AutoModel.from_config(own)


for _kind in ("clip", "siglip", "chinese_clip", "altclip", "clipseg"):
    architecture(
        f"transformers/{_kind}",
        partial(_two_towers, _kind),
        lambda: [batch | {"return_loss": True} for batch in _text_and_pictures()],
    )
_add("AutoModel", _text_and_pictures, "vilt", image_size=16, patch_size=8)
_add(
    "GitForCausalLM",
    lambda: [b | {"labels": b["input_ids"]} for b in _text_and_pictures()],
    "git",
    vision_config=lambda: {**SMALL, "image_size": 16, "patch_size": 8},
    num_image_with_embedding=None,
)


def _series(covariates: bool) -> list[Batch]:
    return [
        {
            "past_values": torch.randn(b, 16),
            "past_time_features": torch.randn(b, 16, 2),
            "past_observed_mask": torch.ones(b, 16),
            "future_values": torch.randn(b, 4),
            "future_time_features": torch.randn(b, 4, 2),
        }
        for b in (2, 3)
    ]


SERIES = {
    "prediction_length": 4,
    "context_length": 12,
    "lags_sequence": [1, 2, 4],
    "num_time_features": 2,
    "label_length": 2,
    "moving_average": 5,
    **ENCODER_DECODER,
}
_add(
    "TimeSeriesTransformerForPrediction",
    partial(_series, True),
    "time_series_transformer",
    **{k: v for k, v in SERIES.items() if k not in ("label_length", "moving_average")},
)
_add(
    "InformerForPrediction",
    partial(_series, True),
    "informer",
    **{k: v for k, v in SERIES.items() if k not in ("label_length", "moving_average")},
)
_add("AutoformerForPrediction", partial(_series, True), "autoformer", **SERIES)
PATCHES = lambda: [
    {"past_values": torch.randn(b, 32, 2), "future_values": torch.randn(b, 8, 2)} for b in (2, 3)
]
_add(
    "PatchTSTForPrediction", PATCHES, "patchtst", num_input_channels=2, context_length=32,
    prediction_length=8, patch_length=4, patch_stride=4, d_model=16, ffn_dim=24,
)  # fmt: skip
_add(
    "PatchTSMixerForPrediction", PATCHES, "patchtsmixer", num_input_channels=2, context_length=32,
    prediction_length=8, patch_length=4, patch_stride=4, d_model=16,
)  # fmt: skip
_add(
    "DecisionTransformerModel",
    lambda: [
        {
            "states": torch.randn(b, 5, 3),
            "actions": torch.randn(b, 5, 2),
            "rewards": torch.randn(b, 5, 1),
            "returns_to_go": torch.randn(b, 5, 1),
            "timesteps": torch.arange(5).repeat(b, 1),
            "attention_mask": torch.ones(b, 5),
        }
        for b in (2, 3)
    ],
    "decision_transformer",
    state_dim=3,
    act_dim=2,
    max_ep_len=20,
    n_layer=2,
    n_head=4,
)
