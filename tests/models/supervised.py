"""Hand-written models with the plain training step: what a tutorial or a small project looks like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.program import Builder, Optimizers, Program, adamw, sgd

BATCH = 4


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def classes(seed: int, count: int, *shape: int) -> Tensor:
    return torch.randint(0, count, shape, generator=torch.Generator().manual_seed(seed))


def use(optimizer: Callable[..., torch.optim.Optimizer]) -> Callable[[nn.Module], Optimizers]:
    return lambda model: [optimizer(model.parameters())]


def classify(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def mlp() -> Program:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 5))
    return Program(model, lambda s: (numbers(s, BATCH, 16), classes(s, 5, BATCH)), classify)


def convnet() -> Program:
    """BatchNorm's running statistics are part of the state that is compared."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    )
    return Program(model, lambda s: (numbers(s, BATCH, 3, 16, 16), classes(s, 5, BATCH)), classify)


def channels_last() -> Program:
    program = convnet()
    program.model = program.model.to(memory_format=torch.channels_last)
    program.batch = lambda s: (
        numbers(s, BATCH, 3, 16, 16).to(memory_format=torch.channels_last),
        classes(s, 5, BATCH),
    )
    return program


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm_a = nn.BatchNorm2d(outside)
        self.b = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm_b = nn.BatchNorm2d(outside)
        self.short = nn.Conv2d(inside, outside, 1, stride) if stride > 1 or inside != outside else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm_a(self.a(x)), inplace=True)
        y = self.norm_b(self.b(y))
        y += self.short(x)
        return F.relu(y, inplace=True)


def resnet() -> Program:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 1, 1),
        Residual(8, 8, 1),
        Residual(8, 16, 2),
        Residual(16, 24, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, 5),
    )
    return Program(model, lambda s: (numbers(s, BATCH, 3, 16, 16), classes(s, 5, BATCH)), classify)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 8, 3, padding=1)
        self.deep = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.bottom = nn.Sequential(nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1))
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.out = nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = F.silu(self.down(x))
        low = self.bottom(self.deep(high))
        joined = torch.cat([self.up(low), high], dim=1)
        return F.interpolate(self.out(joined), scale_factor=2, mode="bilinear", align_corners=False)


def unet() -> Program:
    return Program(UNet(), lambda s: (numbers(s, 2, 1, 16, 16), classes(s, 3, 2, 32, 32)), classify, use(adamw))


def autoencoder() -> Program:
    model = nn.Sequential(
        nn.Linear(24, 12), nn.ELU(), nn.Linear(12, 3), nn.ELU(), nn.Linear(3, 12), nn.GELU(), nn.Linear(12, 24)
    )
    return Program(model, lambda s: numbers(s, BATCH, 24), lambda m, x: F.smooth_l1_loss(m(x), x), use(adamw))


class VAE(nn.Module):
    """The noise comes with the batch, so that the reparametrisation is the same on every device."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(16, 8)
        self.decode = nn.Linear(4, 16)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        mean, log_variance = self.encode(x).chunk(2, dim=-1)
        latent = mean + torch.exp(0.5 * log_variance) * noise
        rebuilt = F.binary_cross_entropy_with_logits(self.decode(latent), torch.sigmoid(x), reduction="sum")
        return rebuilt - 0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())


def vae() -> Program:
    return Program(VAE(), lambda s: (numbers(s, BATCH, 16), numbers(s + 9, BATCH, 4)), lambda m, b: m(*b), use(adamw))


class Recurrent(nn.Module):
    def __init__(self, cell: type[nn.RNNBase], **settings: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8, padding_idx=0)
        self.cell = cell(8, 12, batch_first=True, **settings)
        self.out = nn.Linear(12 * (2 if settings.get("bidirectional") else 1), 5)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.cell(self.embed(ids))
        out: Tensor = self.out(hidden[:, -1])
        return out


def recurrent(cell: type[nn.RNNBase], **settings: Any) -> Builder:
    return lambda: Program(
        Recurrent(cell, **settings), lambda s: (classes(s, 20, BATCH, 7), classes(s, 5, BATCH)), classify
    )


class CellLoop(nn.Module):
    """A recurrence written as a Python loop, with a carried state and an output per step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(6, 10)
        self.out = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 10)
        c = torch.zeros_like(h)
        outputs = []
        for piece in x.unbind(1):
            h, c = self.cell(piece, (h, c))
            outputs.append(self.out(h))
        return torch.stack(outputs, dim=1).mean(1)


def cell_loop() -> Program:
    return Program(CellLoop(), lambda s: (numbers(s, BATCH, 5, 6), classes(s, 3, BATCH)), classify)


class AttentionSeq2Seq(nn.Module):
    """Encoder and decoder GRUs with additive attention, teacher forcing in training and greedy decoding after it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.encoder = nn.GRU(8, 12, batch_first=True)
        self.decoder = nn.GRUCell(8 + 12, 12)
        self.query = nn.Linear(12, 12)
        self.score = nn.Linear(12, 1)
        self.out = nn.Linear(12, 16)

    def decode_one(self, token: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.score(torch.tanh(memory + self.query(hidden)[:, None])).softmax(dim=1)
        context = (weights * memory).sum(1)
        hidden = self.decoder(torch.cat([self.embed(token), context], -1), hidden)
        return self.out(hidden), hidden

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, last = self.encoder(self.embed(source))
        hidden = last[0]
        loss = memory.new_zeros(())
        for i in range(target.shape[1] - 1):
            logits, hidden = self.decode_one(target[:, i], hidden, memory)
            loss = loss + F.cross_entropy(logits, target[:, i + 1])
        return loss

    def greedy(self, source: Tensor, steps: int = 6) -> Tensor:
        memory, last = self.encoder(self.embed(source))
        hidden, token = last[0], source.new_ones(source.shape[0])
        chosen = []
        for _ in range(steps):
            logits, hidden = self.decode_one(token, hidden, memory)
            token = logits.argmax(-1)
            chosen.append(token)
        return torch.stack(chosen, dim=1)


def attention_seq2seq() -> Program:
    return Program(
        AttentionSeq2Seq(),
        lambda s: (classes(s, 16, BATCH, 6), classes(s + 3, 16, BATCH, 5)),
        lambda m, b: m(*b),
        use(adamw),
        generate=lambda m, device: m.greedy(classes(77, 16, BATCH, 6).to(device)),
    )


class Encoder(nn.Module):
    """torch.nn's own transformer layers, with a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(16, 5)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.out(self.layers(self.embed(ids), src_key_padding_mask=ids == 0).mean(1))
        return out


def transformer_encoder() -> Program:
    def batch(s: int) -> tuple[Tensor, Tensor]:
        ids = classes(s, 19, BATCH, 8) + 1
        ids[0, -3:] = 0
        return ids, classes(s, 5, BATCH)

    return Program(Encoder(), batch, classify, use(adamw))


class NanoGPT(nn.Module):
    """A decoder with tied weights, and greedy decoding that feeds the whole prefix each time."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(24, 16)
        self.positions = nn.Embedding(32, 16)
        self.attention = nn.ModuleList(nn.Linear(16, 48) for _ in range(2))
        self.mix = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.norm = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.head = nn.Linear(16, 24, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for project, mix, norm in zip(self.attention, self.mix, self.norm, strict=True):
            q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in project(norm(x)).split(16, dim=-1))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + mix(y.transpose(1, 2).flatten(2))
        out: Tensor = self.head(x)
        return out


def nano_gpt() -> Program:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def generate(model: nn.Module, device: str) -> Tensor:
        ids = classes(5, 24, 2, 4).to(device)
        for _ in range(8):
            ids = torch.cat([ids, model(ids)[:, -1].argmax(-1, keepdim=True)], dim=1)
        return ids

    return Program(NanoGPT(), lambda s: classes(s, 24, BATCH, 12), loss, use(adamw), generate=generate)


class Experts(nn.Module):
    """Routing by indices found at run time: shapes that only the data knows."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            row, slot = torch.where(chosen == i)
            out.index_add_(0, row, expert(x[row]) * weights[row, slot, None])
        load = torch.histc(chosen.float(), bins=4, min=0, max=3)
        return out + 0.0 * load.sum()


def mixture_of_experts() -> Program:
    return Program(Experts(), lambda s: numbers(s, 10, 8), lambda m, x: (m(x) - x.roll(1, 0)).pow(2).mean(), use(adamw))


class GraphNetwork(nn.Module):
    """Message passing by index_add, scatter_reduce and degree normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Linear(12, 6)
        self.update = nn.Linear(12, 6)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor, source: Tensor, target: Tensor, graph: Tensor) -> Tensor:
        messages = F.relu(self.message(torch.cat([x[source], x[target]], -1)))
        total = torch.zeros_like(x).index_add(0, target, messages)
        degree = torch.zeros(x.shape[0], device=x.device).scatter_add(0, target, torch.ones_like(target, dtype=x.dtype))
        peak = torch.zeros_like(x).scatter_reduce(0, target[:, None].expand_as(messages), messages, "amax")
        x = F.relu(self.update(torch.cat([total / degree.clamp(min=1)[:, None], peak], -1)))
        pooled = x.new_zeros(2, 6).index_add_(0, graph, x)
        out: Tensor = self.out(pooled)
        return out


def graph_network() -> Program:
    def batch(s: int) -> tuple[Tensor, ...]:
        graph = torch.tensor([0] * 5 + [1] * 5)
        return numbers(s, 10, 6), classes(s, 10, 24), classes(s + 1, 10, 24), graph, classes(s, 3, 2)

    return Program(GraphNetwork(), batch, lambda m, b: F.cross_entropy(m(*b[:-1]), b[-1]))


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(30, 8, mode="mean")
        self.weighted = nn.EmbeddingBag(30, 8, mode="sum")
        self.out = nn.Linear(16, 2)

    def forward(self, ids: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        joined = torch.cat([self.bag(ids, offsets), self.weighted(ids, offsets, per_sample_weights=weights)], dim=-1)
        out: Tensor = self.out(joined)
        return out


def embedding_bag() -> Program:
    def batch(s: int) -> tuple[Tensor, ...]:
        return classes(s, 30, 12), torch.tensor([0, 4, 5, 9]), numbers(s, 12).abs(), classes(s, 2, 4)

    return Program(Bags(), batch, lambda m, b: F.cross_entropy(m(*b[:-1]), b[-1]))


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 8, 3, stride=2)
        self.lstm = nn.LSTM(8, 8, bidirectional=True, batch_first=True)
        self.out = nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(F.gelu(self.conv(x)).transpose(1, 2))
        return self.out(hidden).log_softmax(-1).transpose(0, 1)


def ctc() -> Program:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, targets = batch
        scores = model(x)
        lengths = torch.full((x.shape[0],), scores.shape[0], dtype=torch.long)
        return F.ctc_loss(scores, targets, lengths, torch.tensor([3, 2, 3, 1]), zero_infinity=True)

    return Program(Speech(), lambda s: (numbers(s, BATCH, 4, 25), classes(s, 5, BATCH, 3) + 1), loss)


class Detector(nn.Module):
    """Set prediction: the assignment is computed on the host between forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.Flatten(2)
        )
        self.queries = nn.Parameter(torch.randn(5, 16))
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)
        self.box, self.kind = nn.Linear(16, 4), nn.Linear(16, 3)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        memory = self.features(images).transpose(1, 2)
        found, _ = self.attend(self.queries.expand(images.shape[0], -1, -1), memory, memory, need_weights=False)
        return self.box(found).sigmoid(), self.kind(found)


def detector() -> Program:
    from scipy.optimize import linear_sum_assignment

    def loss(model: nn.Module, batch: Any) -> Tensor:
        images, boxes, kinds = batch
        predicted, logits = model(images)
        total = predicted.new_zeros(())
        for p, g, b, k in zip(predicted, logits, boxes, kinds, strict=True):
            cost = torch.cdist(p, b, p=1) - g.softmax(-1)[:, k]
            rows, columns = linear_sum_assignment(cost.detach().cpu().numpy())
            total = total + F.l1_loss(p[rows], b[columns]) + F.cross_entropy(g[rows], k[columns])
        return total

    return Program(
        Detector(),
        lambda s: (numbers(s, 2, 3, 16, 16), numbers(s, 2, 3, 4).sigmoid(), classes(s, 3, 2, 3)),
        loss,
        use(sgd),
    )


class Mixer(nn.Module):
    """Permutations, einsum and in-place residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 12, 4, stride=4)
        self.across = nn.Parameter(torch.randn(16, 16) * 0.1)
        self.channel = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))
        self.out = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).permute(0, 2, 1)
        x = x + torch.einsum("bpc,pq->bqc", x, self.across)
        x = x.add(self.channel(x))
        out: Tensor = self.out(x.mean(1))
        return out


def mixer() -> Program:
    return Program(Mixer(), lambda s: (numbers(s, 2, 3, 16, 16), classes(s, 5, 2)), classify, use(adamw))


ZOO: dict[str, Builder] = {
    "mlp": mlp,
    "convnet-batchnorm": convnet,
    "convnet-channels-last": channels_last,
    "resnet-inplace": resnet,
    "unet": unet,
    "autoencoder": autoencoder,
    "vae": vae,
    "rnn": recurrent(nn.RNN),
    "lstm": recurrent(nn.LSTM, num_layers=2, bidirectional=True),
    "gru": recurrent(nn.GRU, num_layers=2),
    "lstm-cell-loop": cell_loop,
    "seq2seq-attention": attention_seq2seq,
    "transformer-encoder": transformer_encoder,
    "nano-gpt": nano_gpt,
    "mixture-of-experts": mixture_of_experts,
    "graph-network": graph_network,
    "embedding-bag": embedding_bag,
    "ctc": ctc,
    "detector-matching": detector,
    "mlp-mixer": mixer,
}
