//! Which numbers follow the rows.

use std::collections::HashMap;

/// Names of counts that are a whole number of each row or sequence, exactly.
const COUNTS: [&str; 4] = ["rows", "sequences", "pairs", "step_rows"];

/// Whether numbers of two dumps with `rows` rows differ as their rows do; remembers what it was shown, so that nodes which
/// agree in one dump and not in the other are told.
pub(super) struct Follows<'a> {
    rows: (u32, u32),
    seen: HashMap<(&'a str, String, u64), u64>,
}

impl<'a> Follows<'a> {
    pub(super) fn new(rows: (u32, u32)) -> Follows<'a> {
        Follows { rows, seen: HashMap::new() }
    }

    /// True if `field` of `kernel` may be `a` under the first's rows and `b` under the second's. Equal numbers are shown too.
    pub(super) fn allows(&mut self, kernel: &'a str, field: &str, a: u64, b: u64) -> bool {
        let agreed = *self.seen.entry((kernel, field.to_string(), a)).or_insert(b);
        agreed == b && grows(self.rows, field, a, b)
    }
}

/// The rule for one number.
fn grows((rows_a, rows_b): (u32, u32), field: &str, a: u64, b: u64) -> bool {
    // With fewer rows first, so that numbers may only grow.
    let (rows_a, rows_b, a, b) = if rows_a < rows_b { (rows_a, rows_b, a, b) } else { (rows_b, rows_a, b, a) };
    let (rows_a, rows_b, a, b) = (u128::from(rows_a), u128::from(rows_b), u128::from(a), u128::from(b));
    if COUNTS.contains(&field) {
        return a * rows_b == b * rows_a;
    }
    // b = ceil(k rows_b) for a k of which a = ceil(k rows_a); a part that does not depend on rows makes b smaller.
    a <= b && (b == a || (b - 1) * rows_a < a * rows_b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_follow_rows_at_most_in_proportion() {
        let rule = |rows, field, a, b| grows(rows, field, a, b);
        assert!(rule((1, 8), "grid", 1, 8) && rule((8, 1), "grid", 8, 1), "in proportion, both ways");
        assert!(rule((1, 8), "extent", 8, 36), "a row more");
        assert!(rule((1, 8), "grid", 16, 16), "not at all");
        assert!(rule((8, 9), "grid", 1, 2), "a tile more");
        assert!(!rule((1, 8), "grid", 1, 9) && !rule((1, 8), "grid", 8, 1), "too much, or the wrong way");
        assert!(rule((1, 8), "rows", 2, 16) && !rule((1, 8), "rows", 1, 7) && !rule((1, 8), "rows", 1, 1));
    }

    #[test]
    fn nodes_of_one_kernel_agree_in_both_dumps_or_in_none() {
        let mut follows = Follows::new((1, 8));
        assert!(follows.allows("score", "width", 2, 4) && follows.allows("score", "width", 2, 4));
        assert!(!follows.allows("score", "width", 2, 3), "3 follows from 2 by the rule, but 4 did before");
        assert!(follows.allows("topk", "width", 2, 3), "of another kernel it may");
    }
}
