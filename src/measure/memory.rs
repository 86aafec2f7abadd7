//! Memory of this process, as the operating system counts it.

/// Resident bytes of this process; `None` where the system does not tell.
pub fn resident_bytes() -> Option<u64> {
    // Second number of /proc/self/statm: resident pages (proc(5)).
    let text = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = text.split_whitespace().nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}
