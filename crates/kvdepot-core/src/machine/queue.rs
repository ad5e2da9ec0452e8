//! A queue in chunks. It never moves its elements, however long it gets.

use std::collections::VecDeque;

const CHUNK: usize = 1024;

/// A FIFO queue.
#[derive(Clone, Debug)]
pub(crate) struct Queue<T> {
    chunks: VecDeque<VecDeque<T>>,
    len: usize,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self { chunks: VecDeque::new(), len: 0 }
    }
}

impl<T> Queue<T> {
    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn push_back(&mut self, item: T) {
        if self.chunks.back().is_none_or(|chunk| chunk.len() == CHUNK) {
            self.chunks.push_back(VecDeque::with_capacity(if self.chunks.is_empty() { 4 } else { CHUNK }));
        }
        if let Some(chunk) = self.chunks.back_mut() {
            chunk.push_back(item);
            self.len += 1;
        }
    }

    pub(crate) fn push_front(&mut self, item: T) {
        if self.chunks.front().is_none_or(|chunk| chunk.len() == CHUNK) {
            self.chunks.push_front(VecDeque::new());
        }
        if let Some(chunk) = self.chunks.front_mut() {
            chunk.push_front(item);
            self.len += 1;
        }
    }

    pub(crate) fn pop_front(&mut self) -> Option<T> {
        let item = self.chunks.front_mut()?.pop_front()?;
        self.len -= 1;
        if self.chunks.front().is_some_and(VecDeque::is_empty) {
            self.chunks.pop_front();
        }
        Some(item)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_is_kept_across_chunks_and_from_both_ends() {
        let mut queue = Queue::default();
        (0..3000).for_each(|n| queue.push_back(n));
        queue.push_front(-1);
        assert_eq!(queue.len(), 3001);
        let all: Vec<i32> = std::iter::from_fn(|| queue.pop_front()).collect();
        assert_eq!(all, (-1..3000).collect::<Vec<_>>());
        assert_eq!(queue.len(), 0);
    }
}
