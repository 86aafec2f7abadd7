// probe: dst = src * mul + add on words, the bits of src/kernels/cpu/probe.rs.
#include "platform.h"
#include "args.h"

KERNEL void probe(const ProbeArgs a) {
    const u64 at = (u64)group(0) * WORKGROUP + lane();
    if (at < a.count) a.dst[at] = a.src[at] * a.mul + a.add;
}
