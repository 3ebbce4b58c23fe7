"""Times the quantizers of optimum-quanto and HQQ and the CPU flash attention of llama.cpp.

usage: bench.py quantize | bench.py attention LIBRARY_FOLDER

Prints one JSON object a line: {"what": ..., "name": ..., "ms": median}. Tensors are what qkv is timed on in the
same run: [1, 8, 4096, 128] f16 to quantize; 32 query heads, 8 kv heads, d 128, one query, to attend.
"""

import json
import os
import statistics
import sys
import time

SHAPE = (1, 8, 4096, 128)
THREADS = os.cpu_count()


def median_ms(run, least=5, seconds=1.0, warm=True):
    """Median of at least `least` runs, after one to warm up; more as long as `seconds` last."""
    if warm:
        run()
    times = []
    start = time.perf_counter()
    while len(times) < least or (time.perf_counter() - start < seconds and len(times) < 200):
        t = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - t))
    return statistics.median(times)


def say(what, name, ms, **more):
    print(json.dumps({"what": what, "name": name, "ms": ms, **more}), flush=True)


def quantizers():
    import torch

    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    x = torch.randn(SHAPE).to(torch.float16)
    with torch.no_grad():
        y = torch.empty_like(x)
        say("copy", "torch copy f16", median_ms(lambda: y.copy_(x)))
        quanto(x)
        hqq(x)


def quanto(x):
    from optimum.quanto import MaxOptimizer, qint2, qint4, quantize_weight

    for bits, kind in ((4, qint4), (2, qint2)):
        for axis in (0, -1):
            # What transformers' QuantoQuantizedCache does: f16 in, min-max pair, groups of 64.
            def run():
                scale, shift = MaxOptimizer()(x, kind, axis, 64)
                return quantize_weight(x, kind, axis, scale, shift, 64)

            name = f"quanto int{bits} axis {axis} g64"
            try:
                packed = run()
            except Exception as e:  # the extension is compiled at first use and needs a C++ compiler
                say("error", name, None, error=repr(e)[:200])
                continue
            say("quantize", name, median_ms(run), bits=bits, axis=axis)
            say("dequantize", name, median_ms(packed.dequantize), bits=bits, axis=axis)


def hqq(x):
    import torch
    from hqq.core.quantize import Quantizer

    # Axis 0 takes the same work at every width: one is enough.
    for bits, axes in ((8, (1,)), (4, (1, 0)), (2, (1,)), (1, (1,))):
        for axis in axes:

            def run():
                # What transformers' HQQQuantizedCache does.
                return Quantizer.quantize(
                    x, axis=axis, device="cpu", compute_dtype=torch.float16, nbits=bits, group_size=64
                )

            name = f"HQQ {bits} bit axis {axis} g64, solver"
            try:
                codes, meta = run()
                meta = {**meta, "compute_dtype": torch.float16}
                say("quantize", name, median_ms(run, least=2, warm=False), bits=bits, axis=axis)
                say("dequantize", name, median_ms(lambda: Quantizer.dequantize(codes, meta)), bits=bits, axis=axis)
            except Exception as e:
                say("error", name, None, error=repr(e)[:200])


def attention(folder):
    from ctypes import CDLL, POINTER, RTLD_GLOBAL, Structure, byref, c_bool, c_char_p, c_float, c_int, c_int64
    from ctypes import c_size_t, c_void_p, CFUNCTYPE, create_string_buffer
    import numpy as np

    base = CDLL(os.path.join(folder, "libggml-base.so"), mode=RTLD_GLOBAL)
    ggml = CDLL(next(os.path.join(folder, f) for f in sorted(os.listdir(folder)) if f.startswith("libggml.")), mode=RTLD_GLOBAL)

    def declare(lib, name, result, *args):
        f = getattr(lib, name)
        f.restype, f.argtypes = result, list(args)
        return f

    class InitParams(Structure):
        _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]

    init = declare(base, "ggml_init", c_void_p, InitParams)
    free = declare(base, "ggml_free", None, c_void_p)
    new_4d = declare(base, "ggml_new_tensor_4d", c_void_p, c_void_p, c_int, c_int64, c_int64, c_int64, c_int64)
    flash = declare(
        base, "ggml_flash_attn_ext", c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_float, c_float, c_float
    )
    new_graph = declare(base, "ggml_new_graph", c_void_p, c_void_p)
    expand = declare(base, "ggml_build_forward_expand", None, c_void_p, c_void_p)
    alloc = declare(base, "ggml_backend_alloc_ctx_tensors", c_void_p, c_void_p, c_void_p)
    free_buffer = declare(base, "ggml_backend_buffer_free", None, c_void_p)
    tensor_set = declare(base, "ggml_backend_tensor_set", None, c_void_p, c_void_p, c_size_t, c_size_t)
    tensor_get = declare(base, "ggml_backend_tensor_get", None, c_void_p, c_void_p, c_size_t, c_size_t)
    compute = declare(base, "ggml_backend_graph_compute", c_int, c_void_p, c_void_p)
    quantize_chunk = declare(
        base, "ggml_quantize_chunk", c_size_t, c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p
    )
    row_size = declare(base, "ggml_row_size", c_size_t, c_int, c_int64)
    proc = declare(base, "ggml_backend_reg_get_proc_address", c_void_p, c_void_p, c_char_p)
    device_reg = declare(base, "ggml_backend_dev_backend_reg", c_void_p, c_void_p)
    get_device = declare(base, "ggml_backend_get_device", c_void_p, c_void_p)
    load_all = declare(ggml, "ggml_backend_load_all_from_path", None, c_char_p)
    by_type = declare(ggml, "ggml_backend_init_by_type", c_void_p, c_int, c_char_p)

    load_all(folder.encode())
    backend = by_type(0, None)  # the CPU variant that suits this machine
    if not backend:
        raise RuntimeError("no CPU backend in " + folder)
    set_threads = CFUNCTYPE(None, c_void_p, c_int)(proc(device_reg(get_device(backend)), b"ggml_backend_set_n_threads"))
    set_threads(backend, THREADS)

    F32, F16, Q4_0, Q8_0 = 0, 1, 2, 8
    heads, kv, d = 32, 8, 128
    rng = np.random.default_rng(0)
    for tokens in (4096, 16384):
        k = rng.standard_normal((kv, tokens, d), dtype=np.float32)
        v = rng.standard_normal((kv, tokens, d), dtype=np.float32)
        q = rng.standard_normal((heads, 1, d), dtype=np.float32)
        scores = np.einsum("hgd,htd->hgt", q.reshape(kv, heads // kv, d).astype(np.float64), k) / d**0.5
        p = np.exp(scores - scores.max(-1, keepdims=True))
        exact = np.einsum("hgt,htd->hgd", p / p.sum(-1, keepdims=True), v).reshape(heads, d)
        for name, kind, tolerance in (("f16", F16, 3e-2), ("q8_0", Q8_0, 2e-2), ("q4_0", Q4_0, 3e-1)):
            ctx = init(InitParams(64 << 20, None, True))
            tq = new_4d(ctx, F32, d, 1, heads, 1)
            tk = new_4d(ctx, kind, d, tokens, kv, 1)
            tv = new_4d(ctx, kind, d, tokens, kv, 1)
            out = flash(ctx, tq, tk, tv, None, d**-0.5, 0.0, 0.0)
            graph = new_graph(ctx)
            expand(graph, out)
            buffer = alloc(ctx, backend)
            tensor_set(tq, q.ctypes.data, 0, q.nbytes)
            for t, x in ((tk, k), (tv, v)):
                if kind == F16:
                    data = x.astype(np.float16)
                    tensor_set(t, data.ctypes.data, 0, data.nbytes)
                else:
                    rows = kv * tokens
                    data = np.empty(row_size(kind, d) * rows, dtype=np.uint8)
                    quantize_chunk(kind, x.ctypes.data, data.ctypes.data, 0, rows, d, None)
                    tensor_set(t, data.ctypes.data, 0, data.nbytes)
            if compute(backend, graph) != 0:
                raise RuntimeError("ggml_backend_graph_compute failed")
            got = np.empty((heads, d), dtype=np.float32)
            tensor_get(out, got.ctypes.data, 0, got.nbytes)
            error = float(np.linalg.norm(got - exact) / np.linalg.norm(exact))
            # A wrong call would be timed as well as a right one.
            if not error < tolerance:
                say("error", f"llama.cpp {name} at {tokens}", None, error=f"relative error {error}")
            else:
                say("attend", f"llama.cpp {name}", median_ms(lambda: compute(backend, graph)), tokens=tokens, kind=name, error=error)
            free_buffer(buffer)
            free(ctx)


if __name__ == "__main__":
    if sys.argv[1:2] == ["quantize"]:
        quantizers()
    elif sys.argv[1:2] == ["attention"] and len(sys.argv) == 3:
        attention(sys.argv[2])
    else:
        sys.exit(__doc__)
