"""Runs written cases (tests/kernels_cases.rs) on tinygrad's emulator of AMD's CDNA, and compares with the CPU ops' results.

usage: run.py OBJECTS CASES [--only TEXT] [--groups N]

OBJECTS is a directory of one architecture that `capstan kernels build` wrote. TINYGRAD must name a tinygrad checkout that has
test/mockgpu/amd/emu.py (August 2026 or later).
"""
import argparse
import ctypes
import functools
import json
import mmap
import os
import pathlib
import struct
import sys
import threading
import time
import types

import numpy as np


class CodeObject:
    """A loaded AMDGPU ELF: segments in executable-looking memory, kernel descriptors by name."""

    def __init__(self, path):
        data = path.read_bytes()
        assert data[:4] == b"\x7fELF", f"{path} is no ELF file"
        program_at, section_at = struct.unpack_from("<QQ", data, 32)
        program_size, programs, section_size, sections = struct.unpack_from("<HHHH", data, 54)
        segments = []
        for i in range(programs):
            kind, _, offset, address, _, in_file, in_memory, _ = struct.unpack_from("<IIQQQQQQ", data, program_at + i * program_size)
            if kind == 1:
                segments.append((address, offset, in_file, in_memory))
        top = max(address + in_memory for address, _, _, in_memory in segments)
        self.memory = mmap.mmap(-1, (top // 4096 + 2) * 4096)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        for address, offset, in_file, _ in segments:
            self.memory[address:address + in_file] = data[offset:offset + in_file]
        self.drop_cache_operations()
        self.symbols = {}
        for i in range(sections):
            _, kind, _, _, offset, size, link, _, _, entry = struct.unpack_from("<IIQQQQIIQQ", data, section_at + i * section_size)
            if kind not in (2, 11):
                continue
            names_at = struct.unpack_from("<IIQQQQIIQQ", data, section_at + link * section_size)[4]
            for j in range(size // entry):
                name_at, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", data, offset + j * entry)
                name = data[names_at + name_at:data.index(b"\0", names_at + name_at)].decode()
                self.symbols[name] = value

    def drop_cache_operations(self):
        """The emulator has no caches and takes buffer_inv and buffer_wbl2 for loads: both become two s_nop."""
        words = np.frombuffer(self.memory, np.uint32)
        for at in np.flatnonzero((words[:-1] & 0xfff00000 == 0xe0a00000) & (words[1:] == 0)):
            self.memory[4 * at:4 * at + 8] = struct.pack("<II", 0xbf800000, 0xbf800000)
        del words

    def launch(self, kernel, grid, workgroup, arguments):
        emu = emulator()
        descriptor = self.symbols[kernel + ".kd"]
        lds, scratch, kernarg = struct.unpack_from("<III", self.memory, descriptor)
        entry, = struct.unpack_from("<q", self.memory, descriptor + 16)
        resources2, properties = struct.unpack_from("<IH", self.memory, descriptor + 52)
        preload, = struct.unpack_from("<H", self.memory, descriptor + 58)
        # Code object 5: after the arguments the grid's workgroups, the workgroup's lanes, and remainders.
        block = bytearray(arguments)
        block += b"\0" * (-len(block) % 8)
        block += struct.pack("<IIIHHHHHH", *grid, *workgroup, 0, 0, 0) + bytes(256)
        block += bytes(max(0, kernarg - len(block)))
        held = (ctypes.c_char * len(block)).from_buffer(block)
        kernarg_at = ctypes.addressof(held)
        packet = (ctypes.c_char * 64)()
        struct.pack_into("<HHHHHHIII", packet, 0, 0, 0, *workgroup, 0, *(g * w for g, w in zip(grid, workgroup)))
        packet_at = ctypes.addressof(packet)
        # Scalar registers in the order in which the descriptor asks for them.
        registers = []
        for bit, words in [(1, [0] * 4), (2, [packet_at & 0xffffffff, packet_at >> 32]), (4, [0, 0]),
                           (8, [kernarg_at & 0xffffffff, kernarg_at >> 32]), (16, [0, 0]), (32, [0, 0]), (64, [0])]:
            if properties & bit:
                registers += words
        registers += [struct.unpack_from("<I", block, 4 * i)[0] for i in range(preload & 0x7f)]
        resources2 = (resources2 & ~(0x1ff << 15)) | ((lds + 511) // 512 << 15)
        emu.run_asm(self.base + descriptor + entry, 0, *grid, *workgroup, kernarg_at, rsrc2=resources2, scratch_size=scratch,
                    arch="cdna", user_data=registers)


# What the emulator of August 2026 has wrong or not at all: its text, and what stands in for it.
#
# Lanes that are switched off read memory and LDS too, at addresses that nobody computed: theirs become that of a spare word.
# A 64-bit compare-and-swap takes both its operands from one register pair: the second comes from the next one.
# An atomic that returns what was there says so by a bit that this architecture calls sc0.
# There is no s_memrealtime: it reads a word that a thread keeps at 100 MHz of real time.
REPAIRS = [
    ("return base_addr + offset64",
     "return _lane_active(exec_mask, lane).where(base_addr + offset64, UOp.const(SPARE, dtypes.uint64))"),
    ("addr = addr + offset\n      return addr", "addr = addr + offset\n      return _lane_active(exec_mask, lane).where(addr, _c(0))"),
    ("  pcode = get_pcode(inst.op)\n  # CDNA pcode uses",
     "  pcode = get_pcode(inst.op)\n  swap = 'CMPSWAP_X2' in op_name\n"
     "  if swap: pcode = pcode.replace('DATA[63 : 0]', 'DATA').replace('DATA[127 : 64]', 'DATA2')\n  # CDNA pcode uses"),
    ("        if data_bits_mem == 64 else ctx.rvgpr_dyn(vdata_reg, lane)\n      return {'ADDR': addr,",
     "        if data_bits_mem == 64 or swap else ctx.rvgpr_dyn(vdata_reg, lane)\n"
     "      two = {'DATA2': _u64(ctx.rvgpr_dyn(vdata_reg + _c(2), lane), ctx.rvgpr_dyn(vdata_reg + _c(3), lane))} if swap else {}\n"
     "      return {**two, 'ADDR': addr,"),
    ("_iattr(inst, 'glc')\n", "_iattr(inst, 'glc') or _iattr(inst, 'sc0')\n"),
    ("  assert (op_name).startswith('S_LOAD_')",
     "  if op_name == 'S_MEMREALTIME':\n"
     "    words = [ctx.vmem.index(UOp.const((CLOCK >> 2) + i, dtypes.uint64)) for i in range(2)]\n"
     "    return UOp.sink(*(ctx.wsgpr_dyn(sdata_reg + _c(i), words[i]) for i in range(2)), *ctx.inc_pc())\n"
     "  assert (op_name).startswith('S_LOAD_')"),
]


@functools.cache
def emulator():
    """The emulator, repaired."""
    path = pathlib.Path(os.environ["TINYGRAD"]) / "test/mockgpu/amd/emu.py"
    text = path.read_text()
    for old, new in REPAIRS:
        if text.count(old) != 1:
            sys.exit(f"{path} is another version than these repairs are for: {text.count(old)} times {old!r}")
        text = text.replace(old, new)
    memory = np.zeros(16, np.uint64)

    def tick():
        while True:
            memory[0] = time.monotonic_ns() // 10
            time.sleep(0.001)

    threading.Thread(target=tick, daemon=True).start()
    emu = types.ModuleType("emu")
    emu.__dict__.update(__file__=str(path), CLOCK=memory.ctypes.data, SPARE=memory.ctypes.data + 64)
    exec(compile(text, str(path), "exec"), emu.__dict__)
    return emu


def values(raw, dtype):
    """Floats of a buffer, None for integers."""
    if dtype == "f32":
        return raw.view(np.float32)
    if dtype == "bf16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype == "fp8_e4m3":
        code = raw.astype(np.int32)
        exponent, mantissa = code >> 3 & 15, code & 7
        size = np.where(exponent == 0, mantissa * 2.0 ** -9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
        return np.where(code & 127 == 127, np.nan, np.where(code & 128, -size, size))
    return None


def differences(buffer, found):
    """How many elements differ, and the first."""
    expected = np.frombuffer(bytes.fromhex(buffer["after"]), np.uint8)
    a, b = values(expected, buffer["dtype"]), values(found, buffer["dtype"])
    if a is None:
        wrong = expected != found
    else:
        low, rel = buffer["tolerance"] or (0.0, 0.0)
        with np.errstate(invalid="ignore"):
            close = (a == b) | (np.abs(a - b) <= low + rel * np.abs(a)) | (np.isnan(a) & np.isnan(b))
        wrong = ~close
        expected, found = a, b
    if not wrong.any():
        return None
    at = int(np.argmax(wrong))
    return f"{int(wrong.sum())} of {wrong.size} differ, first [{at}]: {expected[at]} became {found[at]}"


def run(objects, path, loaded):
    case = json.loads(path.read_text())
    source = pathlib.Path(case["source"]).stem
    if source not in loaded:
        loaded[source] = CodeObject(objects / f"{source}.hsaco")
    arguments = bytearray.fromhex(case["args"])
    memory = []
    for buffer in case["buffers"]:
        raw = np.frombuffer(bytes.fromhex(buffer["before"]), np.uint8)
        # 64-byte aligned, as every buffer of an arena is.
        block = np.zeros(raw.size + 64, np.uint8)
        start = -block.ctypes.data % 64
        view = block[start:start + raw.size]
        view[:] = raw
        memory.append((block, view))
        struct.pack_into("<Q", arguments, buffer["offset"], view.ctypes.data)
    loaded[source].launch(case["kernel"], case["grid"], case["workgroup"], arguments)
    found = ((buffer["field"], differences(buffer, view)) for buffer, (_, view) in zip(case["buffers"], memory))
    return [f"{field}: {what}" for field, what in found if what]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("objects", type=pathlib.Path)
    parser.add_argument("cases", type=pathlib.Path)
    parser.add_argument("--only", default="", help="cases whose file name has this in it")
    parser.add_argument("--groups", type=int, default=64, help="leave out launches of more workgroups")
    options = parser.parse_args()
    if "TINYGRAD" not in os.environ:
        sys.exit("TINYGRAD must name a tinygrad checkout")
    sys.path.insert(0, os.environ["TINYGRAD"])
    os.environ.setdefault("DEV", "CPU")
    loaded, counts = {}, {"ok": 0, "FAILED": 0, "CRASHED": 0}
    for path in sorted(options.cases.glob("*.json")):
        if options.only not in path.name:
            continue
        grid = json.loads(path.read_text())["grid"]
        if grid[0] * grid[1] * grid[2] > options.groups:
            print(f"left out {path.name}: {grid} workgroups", flush=True)
            continue
        started = time.time()
        # A process of its own: the emulator itself may crash.
        child = os.fork()
        if child == 0:
            status = 2
            try:
                wrong = run(options.objects, path, loaded)
                print("; ".join(wrong), end="", flush=True)
                status = 1 if wrong else 0
            except RuntimeError as error:
                print(f"the emulator gives up: {str(error)[:200]}", end="", flush=True)
            finally:
                os._exit(status)
        _, code = os.waitpid(child, 0)
        outcome = {0: "ok", 1: "FAILED"}.get(os.waitstatus_to_exitcode(code), "CRASHED")
        counts[outcome] += 1
        print(f" {outcome} {path.name} ({time.time() - started:.1f} s)", flush=True)
    print(f"{options.objects.name}: {counts['ok']} ok, {counts['FAILED']} failed, {counts['CRASHED']} crashed the emulator")
    sys.exit(1 if counts["FAILED"] or not counts["ok"] else 0)


main()
