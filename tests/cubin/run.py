"""Runs kernel cases (kernels_cases.rs JSON) through the CUDA driver API with prebuilt cubins; then times score, top-k, attend.
usage: run.py CUBINS CASES"""
import ctypes, json, pathlib, struct, sys, time
import numpy as np
cu = ctypes.CDLL("libcuda.so.1")
def ok(code, what=""):
    if code: raise SystemExit(f"{what}: CUDA error {code}")
ok(cu.cuInit(0)); dev = ctypes.c_int(); ok(cu.cuDeviceGet(ctypes.byref(dev), 0)); ctx = ctypes.c_void_p()
ok(cu.cuDevicePrimaryCtxRetain(ctypes.byref(ctx), dev)); ok(cu.cuCtxSetCurrent(ctx))
def alloc(n):
    p = ctypes.c_uint64(); ok(cu.cuMemAlloc_v2(ctypes.byref(p), ctypes.c_size_t(max(n, 1))), "alloc"); return p.value
def put(p, a): ok(cu.cuMemcpyHtoD_v2(ctypes.c_uint64(p), a.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(a.nbytes)), "put")
def get(p, n):
    a = np.empty(n, np.uint8); ok(cu.cuMemcpyDtoH_v2(a.ctypes.data_as(ctypes.c_void_p), ctypes.c_uint64(p), ctypes.c_size_t(n)), "get"); return a
mods = {}
def fn(cubins, source, name):
    if source not in mods:
        m = ctypes.c_void_p(); ok(cu.cuModuleLoadData(ctypes.byref(m), (cubins / f"{source}.cubin").read_bytes()), "load"); mods[source] = m
    f = ctypes.c_void_p(); ok(cu.cuModuleGetFunction(ctypes.byref(f), mods[source], name.encode()), name); return f
def launch(f, grid, args, lds=0):
    buf = ctypes.create_string_buffer(bytes(args), len(args)); arr = (ctypes.c_void_p * 1)(ctypes.addressof(buf))
    ok(cu.cuLaunchKernel(f, *grid, 256, 1, 1, lds, None, arr, None), "launch")
def sync(what): ok(cu.cuCtxSynchronize(), what)
def vals(raw, dt):
    if dt == "f32": return raw.view(np.float32)
    if dt == "bf16": return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dt == "fp8_e4m3":
        c = raw.astype(np.int32); e, m = c >> 3 & 15, c & 7
        s = np.where(e == 0, m * 2.0 ** -9, (8 + m) * 2.0 ** (e - 10.0)); return np.where(c & 127 == 127, np.nan, np.where(c & 128, -s, s))
    return None
def diff(b, got):
    exp = np.frombuffer(bytes.fromhex(b["after"]), np.uint8); x, y = vals(exp, b["dtype"]), vals(got, b["dtype"])
    if x is None: w = exp != got; x, y = exp, got; worst = 0
    else:
        lo, rel = b["tolerance"] or (0, 0)
        with np.errstate(invalid="ignore"): d = np.abs(x - y); w = ~((x == y) | (d <= lo + rel * np.abs(x)) | (np.isnan(x) & np.isnan(y)))
        fin = np.isfinite(x) & np.isfinite(y); worst = float(np.max(d[fin] / (1e-6 + np.abs(x[fin])))) if b["tolerance"] and fin.any() else 0
    if not w.any(): return None, worst
    i = int(np.argmax(w)); return f"{b['field']}: {int(w.sum())}/{w.size} first [{i}] {x[i]} -> {y[i]}", worst
cubins, cases = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]); tally = {}
for path in sorted(cases.glob("*.json")):
    c = json.loads(path.read_text()); args = bytearray.fromhex(c["args"]); ptrs = []
    for b in c["buffers"]:
        raw = np.frombuffer(bytes.fromhex(b["before"]), np.uint8); p = alloc(raw.size); put(p, raw); ptrs.append((p, raw.size)); struct.pack_into("<Q", args, b["offset"], p)
    launch(fn(cubins, pathlib.Path(c["source"]).stem, c["kernel"]), c["grid"], args, c.get("lds_bytes", 0)); sync(path.name)
    res = [diff(b, get(p, n)) for b, (p, n) in zip(c["buffers"], ptrs)]; bad = [r for r, _ in res if r]; worst = max(w for _, w in res)
    t = tally.setdefault(c["kernel"], [0, 0, 0.0]); t[0] += 1; t[1] += bool(bad); t[2] = max(t[2], worst)
    if bad: print("FAILED", path.name, c["name"][:400], "|", "; ".join(bad))
    for p, _ in ptrs: cu.cuMemFree_v2(ctypes.c_uint64(p))
for k, (n, f, w) in tally.items(): print(f"{k}: {n - f}/{n} equal" + (f", largest relative difference where allowed {w:.2e}" if w else ""))
# Times: fp8 index cache, bf16 KV, 4 index heads, 4 KV heads, 64 q heads, head_dim 128; rows x context as in design.md's table.
def timed(f, grid, args, n=200):
    s = ctypes.c_void_p(); ok(cu.cuStreamCreate(ctypes.byref(s), 1)); a, b = ctypes.c_void_p(), ctypes.c_void_p()
    ok(cu.cuEventCreate(ctypes.byref(a), 0)); ok(cu.cuEventCreate(ctypes.byref(b), 0))
    buf = ctypes.create_string_buffer(bytes(args), len(args)); arr = (ctypes.c_void_p * 1)(ctypes.addressof(buf)); best = 1e9
    for _ in range(5):
        ok(cu.cuEventRecord(a, s))
        for _ in range(n): ok(cu.cuLaunchKernel(f, *grid, 256, 1, 1, 0, s, arr, None))
        ok(cu.cuEventRecord(b, s)); ok(cu.cuStreamSynchronize(s), "timed"); ms = ctypes.c_float(); ok(cu.cuEventElapsedTime(ctypes.byref(ms), a, b)); best = min(best, ms.value * 1000 / n)
    return best
rng = np.random.default_rng(1)
print("| rows | context | score | top-k | attend | (us, back to back; small ones are bound by launches)")
for ctx_len in (8192, 32768, 131072):
    for rows in (1, 8, 32, 128):
        nb = ctx_len // 128; blocks = rows * nb; width = max(64, 1 << (nb - 1).bit_length())
        up = lambda arr: (lambda p: (put(p, arr), p)[1])(alloc(arr.nbytes))
        q = up(rng.integers(0, 120, rows * 4 * 128, dtype=np.uint8)); keys = alloc(blocks * 16384); ok(cu.cuMemsetD32_v2(ctypes.c_uint64(keys), 0x3a35b2b8, ctypes.c_size_t(blocks * 4096)))
        table = up(rng.permutation(blocks).astype(np.int32)); slot = up(np.arange(rows, dtype=np.int32)); lens = up(np.full(rows, ctx_len, np.int32))
        score = up(rng.standard_normal(4 * rows * width).astype(np.float32)); chunks = max(1, min(-(-1024 // rows), -(-nb // 4)))
        a = struct.pack("<6Q16I", q, keys, table, slot, lens, score, rows, 1, 4, 128, 128, 0, 1, rows, width, rows, nb, blocks, 0, 1, 2, 0)
        ts = timed(fn(cubins, "score", "score_decode_m3"), (chunks, rows, 1), a)
        put(score, rng.standard_normal(4 * rows * width).astype(np.float32))
        idx = alloc(4 * rows * 64); pt = alloc(rows * 4 * 128 * 4); pl = alloc(rows * 16)
        kvb = min(blocks, 4096)
        a = struct.pack("<7Q12I", score, slot, lens, up((rng.permutation(blocks) % kvb).astype(np.int32)), idx, pt, pl, rows, 4, 4, 16, 128, rows, width, rows, rows, nb, kvb, 0)
        tk = timed(fn(cubins, "topk", "topk_emit"), (rows, 4, 1), a)
        kv = alloc(kvb * 2 * 128 * 4 * 128 * 2); ok(cu.cuMemsetD32_v2(ctypes.c_uint64(kv), 0x3f803f80, ctypes.c_size_t(kvb * 2 * 128 * 4 * 64)))
        qf = up(rng.standard_normal(rows * 64 * 128).astype(np.float32)); out = alloc(rows * 64 * 128 * 4)
        a = struct.pack("<5Q8I3fI", qf, kv, pt, pl, out, rows, 64, 4, 128, 128, 128, kvb, 1, 128 ** -0.5, 1.0, 1.0, 0)
        ta = timed(fn(cubins, "attend", "attend_sparse"), (rows, 4, 1), a)
        print(f"| {rows} | {ctx_len // 1024}K | {ts:.1f} | {tk:.1f} | {ta:.1f} |", flush=True)
        for p in (q, keys, table, slot, lens, score, idx, pt, pl, kv, qf, out): cu.cuMemFree_v2(ctypes.c_uint64(p))
