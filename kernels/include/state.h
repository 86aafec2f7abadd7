// The state of a step on the device: StepState of src/kernels/step.rs.
#pragma once
#include "platform.h"

struct StepState {
    u64 sequence;
    u32 live_sequences, live_rows, error, error_detail[3], kv_len_max, reserved[7];
};
static_assert(sizeof(StepState) == 64, "StepState");
