//! Cases on the CPU ops, the oracle of every other executor.

#![expect(unsafe_code, reason = "calls ops on memory of the test")]

use capstan::hal::Workgroup;

use super::Case;

/// Calls `run` with the arguments pointing to fresh memory; gives what it holds afterwards.
pub fn with_memory(case: &Case, run: impl FnOnce(&[u8])) -> Vec<Vec<u8>> {
    let mut memory: Vec<Vec<u128>> = case
        .buffers
        .iter()
        .map(|buffer| {
            let mut words = vec![0u128; buffer.bytes.len().div_ceil(16)];
            bytemuck::cast_slice_mut(&mut words)[..buffer.bytes.len()].copy_from_slice(&buffer.bytes);
            words
        })
        .collect();
    let addresses: Vec<u64> = memory.iter_mut().map(|words| words.as_mut_ptr().expose_provenance() as u64).collect();
    run(&case.args_at(&addresses));
    let buffers = memory.iter().zip(&case.buffers);
    buffers.map(|(words, buffer)| bytemuck::cast_slice(words)[..buffer.bytes.len()].to_vec()).collect()
}

/// The CPU op over the whole grid.
pub fn run_op(case: &Case) -> Vec<Vec<u8>> {
    with_memory(case, |args| {
        let mut lds = vec![0u64; case.shape.lds_bytes.div_ceil(8) as usize];
        let [x, y, z] = case.shape.grid;
        for at in 0..x * y * z {
            let lds = &mut bytemuck::cast_slice_mut(&mut lds)[..case.shape.lds_bytes as usize];
            let id = [at % x, at / x % y, at / x / y];
            // SAFETY: the arguments point to memory of the declared extents; nothing else uses it.
            unsafe { (case.kernel.cpu)(args, &mut Workgroup { id, shape: case.shape, lds }) }
        }
    })
}
