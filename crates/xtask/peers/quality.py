"""The quality protocol of `cargo xtask quality` once more, in numpy and without any code of this project: how far do its figures
depend on who computes them?

    python3 -m venv target/quality && target/quality/bin/pip install numpy gguf ml_dtypes
    OPENBLAS_NUM_THREADS=1 target/quality/bin/python crates/xtask/peers/quality.py \
        target/qkv-data/SmolLM2-135M-Instruct.Q4_1.gguf crates/xtask/data/windows.json 6

FP8 E4M3 with one scale a tensor (`tensor`; the second run has scales that are one part in a million larger, so that the
difference between the two is rounding), and with one a token and head (`token-head`). Everything in f32.
"""

import json
import sys

import gguf
import ml_dtypes
import numpy as np

F32 = np.float32
LAYERS, HEADS, KV_HEADS, DIM = 30, 9, 3, 64
PREFIX, STEP, TOKENS = 512, 32, 1024


class Model:
    def __init__(self, path):
        reader = gguf.GGUFReader(path)
        self.weights = {
            t.name: gguf.dequantize(t.data, t.tensor_type).astype(F32).reshape([int(n) for n in t.shape[::-1]])
            for t in reader.tensors
        }
        base = F32(reader.fields["llama.rope.freq_base"].parts[-1][0])
        self.epsilon = F32(reader.fields["llama.attention.layer_norm_rms_epsilon"].parts[-1][0])
        self.frequencies = F32(1) / base ** (np.arange(0, DIM, 2, dtype=F32) / F32(DIM))
        self.embedding = self.weights["token_embd.weight"]

    def norm(self, x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True, dtype=F32) + self.epsilon) * self.weights[weight]

    def rope(self, x, positions):
        angle = positions[:, None].astype(F32) * self.frequencies
        cos, sin = np.cos(angle), np.sin(angle)
        out = np.empty_like(x)
        out[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
        out[..., 1::2] = x[..., 0::2] * sin + x[..., 1::2] * cos
        return out

    def forward(self, ids, positions, store):
        """Normalised hidden states; `store(layer, k, v)` returns the keys and values to attend to."""
        x = self.embedding[ids]
        for layer in range(LAYERS):
            w = lambda name: self.weights[f"blk.{layer}.{name}.weight"].T
            h = self.norm(x, f"blk.{layer}.attn_norm.weight")
            split = lambda y, n: y.reshape(len(ids), n, DIM).transpose(1, 0, 2)
            q = self.rope(split(h @ w("attn_q"), HEADS), positions)
            k = self.rope(split(h @ w("attn_k"), KV_HEADS), positions)
            k, v = store(layer, k, split(h @ w("attn_v"), KV_HEADS))
            k, v = (np.repeat(y, HEADS // KV_HEADS, 0) for y in (k, v))
            scores = q @ k.transpose(0, 2, 1) * F32(DIM**-0.5)
            scores[:, np.arange(k.shape[1]) > positions[:, None]] = -np.inf
            p = np.exp(scores - scores.max(-1, keepdims=True))
            o = (p / p.sum(-1, keepdims=True)) @ v
            x = x + o.transpose(1, 0, 2).reshape(len(ids), HEADS * DIM) @ w("attn_output")
            h = self.norm(x, f"blk.{layer}.ffn_norm.weight")
            gate = h @ w("ffn_gate")
            x = x + (gate / (1 + np.exp(-gate)) * (h @ w("ffn_up"))) @ w("ffn_down")
        return self.norm(x, "output_norm.weight")

    def log_probabilities(self, hidden):
        logits = (hidden @ self.embedding.T).astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def fp8(x, scale):
    return np.clip(x / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(F32) * scale


def codec(scheme, prefix):
    """What stores keys or values of one layer, calibrated on its exact prefix."""
    if scheme == "token-head":
        return lambda x: fp8(x, np.maximum(np.abs(x).max(-1, keepdims=True) / F32(448), F32(1e-30)))
    scale = F32(np.abs(prefix).max() / F32(448)) * F32(1.000001 if scheme == "tensor, again" else 1)
    return lambda x: fp8(x, scale)


def window(model, ids, schemes):
    """(negative log-likelihood of the exact pass, {scheme: (sum of KL, negative log-likelihood)})."""
    ids, exact = np.array(ids), {}

    def keep(layer, k, v):
        exact[layer] = (k, v)
        return k, v

    hidden = model.forward(ids[:TOKENS], np.arange(TOKENS), keep)
    reference = model.log_probabilities(hidden[PREFIX:])
    next_ids = ids[PREFIX + 1 : TOKENS + 1]
    own = -reference[np.arange(len(next_ids)), next_ids].sum()
    results = {}
    for scheme in schemes:
        stored = {}
        for layer, kv in exact.items():
            codecs = [codec(scheme, x[:, :PREFIX]) for x in kv]
            stored[layer] = [codecs, [c(x[:, :PREFIX]) for c, x in zip(codecs, kv)]]

        def append(layer, k, v):
            codecs, held = stored[layer]
            stored[layer][1] = [np.concatenate([h, c(x)], 1) for c, h, x in zip(codecs, held, (k, v))]
            return stored[layer][1]

        kl = loss = 0.0
        for at in range(PREFIX, TOKENS, STEP):
            rows = np.arange(at, at + STEP)
            got = model.log_probabilities(model.forward(ids[rows], rows, append))
            want = reference[rows - PREFIX]
            kl += (np.exp(want) * (want - got)).sum()
            loss -= got[np.arange(STEP), ids[rows + 1]].sum()
        results[scheme] = np.array([kl, loss])
    return own, results


def main():
    model, windows = Model(sys.argv[1]), json.load(open(sys.argv[2]))["ids"][: int(sys.argv[3])]
    schemes = ["tensor", "tensor, again", "token-head"]
    own, totals, tokens = 0.0, {s: np.zeros(2) for s in schemes}, 0
    for i, ids in enumerate(windows):
        loss, results = window(model, ids, schemes)
        own, tokens = own + loss, tokens + TOKENS - PREFIX
        for s in schemes:
            totals[s] += results[s]
        print(f"window {i + 1}:", {s: round(float(r[0]) / (TOKENS - PREFIX), 6) for s, r in results.items()}, flush=True)
    print(f"exact: perplexity {np.exp(own / tokens):.3f}")
    for s in schemes:
        kl, loss = totals[s] / tokens
        print(f"{s}: KL {kl:.5f}, perplexity {np.exp(loss):.3f}")


main()
