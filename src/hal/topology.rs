//! The order in which nodes of a driver's graph were recorded.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// An order of `0..count` in which every edge goes forward: of the nodes that may come next always the one the driver listed
/// first. Of a straight chain there is only one such order, and it is the recording's.
///
/// `None` if the edges have a circle or name a node that is not there.
pub(super) fn order(count: usize, edges: &[(usize, usize)]) -> Option<Vec<usize>> {
    let mut waits = vec![0usize; count];
    let mut after: Vec<Vec<usize>> = vec![Vec::new(); count];
    for &(from, to) in edges {
        *waits.get_mut(to)? += 1;
        after.get_mut(from)?.push(to);
    }
    let mut ready: BinaryHeap<_> = (0..count).filter(|&node| waits[node] == 0).map(Reverse).collect();
    let mut order = Vec::with_capacity(count);
    while let Some(Reverse(node)) = ready.pop() {
        order.push(node);
        for &next in &after[node] {
            waits[next] -= 1;
            if waits[next] == 0 {
                ready.push(Reverse(next));
            }
        }
    }
    (order.len() == count).then_some(order)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edges_go_forward_and_ties_keep_the_drivers_order() {
        assert_eq!(order(3, &[(2, 1), (1, 0)]), Some(vec![2, 1, 0]));
        assert_eq!(order(4, &[(0, 3), (3, 1)]), Some(vec![0, 2, 3, 1]));
        assert_eq!(order(0, &[]), Some(vec![]));
        assert_eq!(order(2, &[(0, 1), (1, 0)]), None);
        assert_eq!(order(2, &[(0, 5)]), None);
    }
}
