//! The pool of cache blocks.

use crate::runtime::BlockId;

/// Free cache blocks, handed out last-freed first. Never allocates after [`BlockPool::new`].
#[derive(Debug)]
pub struct BlockPool {
    free: Vec<BlockId>,
    total: usize,
}

impl BlockPool {
    /// All `total` blocks free; the lowest ids go first.
    pub fn new(total: u32) -> BlockPool {
        BlockPool { free: (0..total).rev().collect(), total: total as usize }
    }

    /// Moves `count` blocks into `into`, or none and false if there are fewer.
    pub fn take(&mut self, count: usize, into: &mut Vec<BlockId>) -> bool {
        if count > self.free.len() {
            return false;
        }
        into.extend(self.free.drain(self.free.len() - count..).rev());
        true
    }

    /// Gives a block back.
    pub fn give(&mut self, block: BlockId) {
        assert!(self.free.len() < self.total, "invariant: a block is given back once");
        self.free.push(block);
    }

    /// Free blocks.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// All blocks.
    pub fn total(&self) -> usize {
        self.total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_or_none() {
        let mut pool = BlockPool::new(3);
        let mut blocks = Vec::new();
        assert!(pool.take(2, &mut blocks));
        assert_eq!(blocks, [0, 1]);
        assert!(!pool.take(2, &mut blocks));
        assert_eq!(pool.free(), 1);
        pool.give(1);
        assert!(pool.take(2, &mut blocks));
        assert_eq!(blocks, [0, 1, 1, 2]);
    }
}
