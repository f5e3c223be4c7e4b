"""Architectures of the Hugging Face library, tiny, with random weights: nothing is downloaded.

The point is their code, not their size: each brings its own masks, caches, position encodings and indexing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import sizes
from benchmarks.sizes import VOCABULARY
from tests.models.program import Builder, Optimizers, Program, adamw, sgd

BATCH, LENGTH = 2, 12
NEW_TOKENS = 8

#: A configuration takes what it knows.
SMALL: dict[str, Any] = {
    **sizes.SMALL,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
    "dropout": 0.0,
    "activation_dropout": 0.0,
}


def _adamw(model: nn.Module) -> Optimizers:
    return [adamw(model.parameters())]


def _sgd(model: nn.Module) -> Optimizers:
    return [sgd(model.parameters())]


def _tokens(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, shape, generator=generator)


def _numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _model(class_name: str, config_name: str, settings: dict[str, Any]) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    # An Ellipsis takes a shared setting away from an architecture that does not have it.
    config = getattr(transformers, config_name)(**{k: v for k, v in settings.items() if v is not ...})
    model: nn.Module = getattr(transformers, class_name)(config)
    return model


def _own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss that the architecture computes itself when it is given labels."""
    loss: Tensor = model(**batch).loss
    return loss


def _output_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """For backbones without a head: a loss over whatever the first output is."""
    first: Tensor = model(**batch)[0]
    return first.float().pow(2).mean() + first.float().abs().mean()


def causal(class_name: str, config_name: str, *, cache: bool = True, **settings: Any) -> Builder:
    """A decoder: next-token loss on a padded batch, then greedy generation with its growing cache."""

    def batch(step: int) -> dict[str, Tensor]:
        ids = _tokens(step, BATCH, LENGTH)
        mask = torch.ones_like(ids)
        mask[1, -3:] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    def generate(model: Any, device: str) -> Tensor:
        ids = _tokens(99, BATCH, 5).to(device)
        out: Tensor = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            use_cache=cache,
            pad_token_id=0,
        )
        return out

    def build() -> Program:
        model = _model(class_name, config_name, {**SMALL, **settings})
        return Program(model, batch, _own_loss, _adamw, generate=generate)

    return build


def encoder(class_name: str, config_name: str, **settings: Any) -> Builder:
    """A masked language model on a padded batch."""

    def batch(step: int) -> dict[str, Tensor]:
        ids = _tokens(step, BATCH, LENGTH)
        mask = torch.ones_like(ids)
        mask[0, -4:] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": ids}

    def build() -> Program:
        return Program(_model(class_name, config_name, {**SMALL, **settings}), batch, _own_loss, _adamw)

    return build


def seq2seq(class_name: str, config_name: str, **settings: Any) -> Builder:
    """An encoder-decoder on token pairs, then greedy generation with both of its caches."""

    def batch(step: int) -> dict[str, Tensor]:
        return {"input_ids": _tokens(step, BATCH, LENGTH), "labels": _tokens(step + 50, BATCH, 7)}

    def generate(model: Any, device: str) -> Tensor:
        ids = _tokens(99, BATCH, 6).to(device)
        out: Tensor = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            num_beams=1,
        )
        return out

    def build() -> Program:
        shared = {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": 64,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
            "forced_eos_token_id": None,
            "forced_bos_token_id": None,
        }
        return Program(
            _model(class_name, config_name, {**shared, **settings}), batch, _own_loss, _adamw, generate=generate
        )

    return build


def image(class_name: str, config_name: str, *, size: int = 32, labels: int = 5, **settings: Any) -> Builder:
    """An image classifier."""

    def batch(step: int) -> dict[str, Tensor]:
        target = torch.randint(0, labels, (BATCH,), generator=torch.Generator().manual_seed(step))
        return {"pixel_values": _numbers(step, BATCH, 3, size, size), "labels": target}

    def build() -> Program:
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "drop_path_rate": 0.0}
        return Program(
            _model(class_name, config_name, {**dropout, "num_labels": labels, **settings}), batch, _own_loss, _sgd
        )

    return build


def other(
    class_name: str,
    config_name: str,
    batch: Callable[[int], dict[str, Tensor]],
    loss: Callable[[nn.Module, Any], Tensor] = _own_loss,
    generate: Callable[[Any, str], Tensor] | None = None,
    **settings: Any,
) -> Builder:
    """Anything that fits none of the kinds above."""
    return lambda: Program(_model(class_name, config_name, settings), batch, loss, _adamw, generate=generate)


_VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
}


def _segment_batch(step: int) -> dict[str, Tensor]:
    labels = torch.randint(0, 4, (BATCH, 32, 32), generator=torch.Generator().manual_seed(step))
    return {"pixel_values": _numbers(step, BATCH, 3, 32, 32), "labels": labels}


def _clip_batch(step: int) -> dict[str, Tensor]:
    return {
        "input_ids": _tokens(step, BATCH, LENGTH),
        "pixel_values": _numbers(step, BATCH, 3, 32, 32),
        "return_loss": True,
    }


_CLIP = {
    "text_config": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 16,
        "projection_dim": 16,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "vision_config": {**_VIT, "projection_dim": 16},
    "projection_dim": 16,
}


def _whisper_batch(step: int) -> dict[str, Tensor]:
    return {"input_features": _numbers(step, BATCH, 16, 40), "labels": _tokens(step, BATCH, 7)}


def _whisper_generate(model: Any, device: str) -> Tensor:
    """Greedy by hand: Whisper's own ``generate`` wants a trained model's special tokens."""
    features = _numbers(99, BATCH, 16, 40).to(device)
    tokens = torch.ones(BATCH, 1, dtype=torch.long, device=device)
    encoded = model.get_encoder()(features)
    cache = None
    for _ in range(NEW_TOKENS):
        step = tokens if cache is None else tokens[:, -1:]
        out = model(encoder_outputs=encoded, decoder_input_ids=step, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        tokens = torch.cat([tokens, out.logits[:, -1:].argmax(-1)], dim=1)
    return tokens


def _speech_batch(step: int) -> dict[str, Tensor]:
    return {"input_values": _numbers(step, BATCH, 400), "labels": _tokens(step, BATCH, 4)}


_SPEECH = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "conv_dim": (16, 16, 16),
    "conv_stride": (4, 2, 2),
    "conv_kernel": (8, 3, 3),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "hidden_dropout": 0.0,
    "activation_dropout": 0.0,
    "attention_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
    "layerdrop": 0.0,
    "mask_time_prob": 0.0,
    "apply_spec_augment": False,
    "ctc_loss_reduction": "mean",
    "ctc_zero_infinity": True,
    "pad_token_id": 0,
}


def _masked_image_batch(step: int) -> dict[str, Tensor]:
    return {"pixel_values": _numbers(step, BATCH, 3, 32, 32), "noise": _numbers(step + 7, BATCH, 16).abs()}


def _series_batch(step: int) -> dict[str, Tensor]:
    return {"past_values": _numbers(step, BATCH, 32, 3), "future_values": _numbers(step + 5, BATCH, 8, 3)}


ZOO: dict[str, Builder] = {
    "gpt2": causal("GPT2LMHeadModel", "GPT2Config", **sizes.GPT2),
    "llama": causal("LlamaForCausalLM", "LlamaConfig"),
    "mistral": causal("MistralForCausalLM", "MistralConfig", sliding_window=6),
    "mixtral": causal("MixtralForCausalLM", "MixtralConfig", num_local_experts=4, num_experts_per_tok=2),
    "qwen2": causal("Qwen2ForCausalLM", "Qwen2Config"),
    "qwen2-moe": causal(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        output_router_logits=True,
    ),
    "qwen3": causal("Qwen3ForCausalLM", "Qwen3Config", head_dim=8),
    "gemma": causal("GemmaForCausalLM", "GemmaConfig", head_dim=8),
    "gemma2": causal("Gemma2ForCausalLM", "Gemma2Config", head_dim=8, sliding_window=6, query_pre_attn_scalar=8),
    "phi": causal("PhiForCausalLM", "PhiConfig"),
    "phi3": causal("Phi3ForCausalLM", "Phi3Config"),
    "opt": causal("OPTForCausalLM", "OPTConfig", **sizes.OPT),
    "bloom": causal("BloomForCausalLM", "BloomConfig", **sizes.BLOOM),
    "gpt-neox": causal("GPTNeoXForCausalLM", "GPTNeoXConfig"),
    "gpt-neo": causal(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
        embed_dropout=0.0,
        resid_dropout=0.0,
    ),
    "gptj": causal("GPTJForCausalLM", "GPTJConfig", rotary_dim=4, **sizes.GPT2),
    "gpt-bigcode": causal("GPTBigCodeForCausalLM", "GPTBigCodeConfig", **sizes.GPT2),
    "falcon": causal("FalconForCausalLM", "FalconConfig", new_decoder_architecture=False, alibi=False),
    "mpt": causal("MptForCausalLM", "MptConfig", d_model=32, n_heads=4, n_layers=2, max_seq_len=64),
    "stablelm": causal("StableLmForCausalLM", "StableLmConfig"),
    "olmo2": causal("Olmo2ForCausalLM", "Olmo2Config"),
    "deepseek-v3": causal(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=16,
        q_lora_rank=16,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        qk_nope_head_dim=4,
        first_k_dense_replace=1,
        n_shared_experts=1,
        num_key_value_heads=4,
    ),
    "mamba": causal("MambaForCausalLM", "MambaConfig", state_size=4, time_step_rank=4),
    "mamba2": causal(
        "Mamba2ForCausalLM", "Mamba2Config", num_heads=8, head_dim=8, state_size=8, n_groups=2, chunk_size=4, expand=2
    ),
    "rwkv": causal("RwkvForCausalLM", "RwkvConfig", context_length=64, attention_hidden_size=32),
    "xlnet": causal(
        "XLNetLMHeadModel", "XLNetConfig", d_model=32, n_layer=2, n_head=4, d_inner=48, max_position_embeddings=...
    ),
    "bert": encoder("BertForMaskedLM", "BertConfig"),
    "roberta": encoder("RobertaForMaskedLM", "RobertaConfig"),
    "distilbert": encoder("DistilBertForMaskedLM", "DistilBertConfig", dim=32, n_layers=2, n_heads=4, hidden_dim=48),
    "albert": encoder("AlbertForMaskedLM", "AlbertConfig", embedding_size=16),
    "electra": encoder("ElectraForMaskedLM", "ElectraConfig", embedding_size=16),
    "deberta-v2": encoder(
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        max_relative_positions=16,
        position_buckets=8,
        share_att_key=True,
        norm_rel_ebd="layer_norm",
    ),
    "modernbert": encoder(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        cls_token_id=1,
        sep_token_id=2,
        local_attention=8,
        mlp_dropout=0.0,
        embedding_dropout=0.0,
    ),
    "longformer": encoder("LongformerForMaskedLM", "LongformerConfig", attention_window=4, sep_token_id=2),
    "fnet": other(
        "FNetForMaskedLM",
        "FNetConfig",
        lambda step: {"input_ids": _tokens(step, BATCH, LENGTH), "labels": _tokens(step, BATCH, LENGTH)},
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=48,
        hidden_dropout_prob=0.0,
        max_position_embeddings=64,
    ),
    "t5": seq2seq(
        "T5ForConditionalGeneration", "T5Config", d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0
    ),
    "bart": seq2seq("BartForConditionalGeneration", "BartConfig"),
    "pegasus": seq2seq("PegasusForConditionalGeneration", "PegasusConfig"),
    "marian": seq2seq("MarianMTModel", "MarianConfig"),
    "vit": image("ViTForImageClassification", "ViTConfig", **_VIT),
    "deit": image("DeiTForImageClassification", "DeiTConfig", **_VIT),
    "beit": image("BeitForImageClassification", "BeitConfig", use_relative_position_bias=True, **_VIT),
    "dinov2": image(
        "Dinov2ForImageClassification", "Dinov2Config", **{k: v for k, v in _VIT.items() if k != "intermediate_size"}
    ),
    "vit-mae": other(
        "ViTMAEForPreTraining",
        "ViTMAEConfig",
        _masked_image_batch,
        **_VIT,
        decoder_hidden_size=16,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=32,
        hidden_dropout_prob=0.0,
    ),
    "swin": image(
        "SwinForImageClassification",
        "SwinConfig",
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[1, 2],
        num_heads=[2, 4],
        window_size=4,
    ),
    "convnext": image(
        "ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=[8, 16, 16, 24], depths=[1, 1, 1, 1]
    ),
    "resnet": image(
        "ResNetForImageClassification",
        "ResNetConfig",
        embedding_size=8,
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 1, 1],
    ),
    "regnet": image(
        "RegNetForImageClassification",
        "RegNetConfig",
        embedding_size=8,
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 1, 1],
        groups_width=8,
    ),
    "mobilenet-v2": image(
        "MobileNetV2ForImageClassification",
        "MobileNetV2Config",
        depth_multiplier=0.25,
        image_size=32,
        classifier_dropout_prob=0.0,
    ),
    "segformer": other(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        _segment_batch,
        num_labels=4,
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 3, 4],
        decoder_hidden_size=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        classifier_dropout_prob=0.0,
        drop_path_rate=0.0,
    ),
    "clip": other("CLIPModel", "CLIPConfig", _clip_batch, **_CLIP),
    "whisper": other(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        _whisper_batch,
        generate=_whisper_generate,
        vocab_size=VOCABULARY,
        num_mel_bins=16,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=20,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        dropout=0.0,
    ),
    "wav2vec2": other("Wav2Vec2ForCTC", "Wav2Vec2Config", _speech_batch, **_SPEECH),
    "hubert": other("HubertForCTC", "HubertConfig", _speech_batch, **_SPEECH),
    "patchtst": other(
        "PatchTSTForPrediction",
        "PatchTSTConfig",
        _series_batch,
        num_input_channels=3,
        context_length=32,
        prediction_length=8,
        patch_length=8,
        patch_stride=8,
        d_model=16,
        num_attention_heads=2,
        num_hidden_layers=2,
        ffn_dim=32,
        attention_dropout=0.0,
        ff_dropout=0.0,
        path_dropout=0.0,
        head_dropout=0.0,
        positional_dropout=0.0,
    ),
}
