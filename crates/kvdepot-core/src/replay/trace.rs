//! A trace in memory: requests ordered by time, and the numbers of all their blocks in one vector.

use foldhash::fast::FixedState;
use hashbrown::HashSet;

/// One request of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Milliseconds since the start of the trace, or since any other moment.
    pub timestamp_ms: u64,
    /// Tokens of the prompt.
    pub input_length: u64,
    /// Tokens of the answer.
    pub output_length: u64,
    begin: usize,
    len: usize,
}

/// Requests and their blocks.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    requests: Vec<Request>,
    blocks: Vec<u64>,
}

impl Trace {
    /// Makes an empty trace.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a request. A block's number is any number that represents its hash.
    pub fn push(&mut self, timestamp_ms: u64, input_length: u64, output_length: u64, blocks: &[u64]) {
        let begin = self.blocks.len();
        self.blocks.extend_from_slice(blocks);
        self.requests.push(Request { timestamp_ms, input_length, output_length, begin, len: blocks.len() });
    }

    /// Sorts the requests by time. Requests of the same moment keep their order.
    pub fn sort(&mut self) {
        self.requests.sort_by_key(|request| request.timestamp_ms);
    }

    /// Returns all requests.
    pub fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// Returns the blocks of a request of this trace, from its first one.
    pub fn blocks(&self, request: &Request) -> &[u64] {
        &self.blocks[request.begin..request.begin + request.len]
    }

    /// Returns the number of blocks named by all requests.
    pub fn references(&self) -> u64 {
        self.blocks.len() as u64
    }

    /// Returns the number of distinct blocks among them.
    pub fn distinct(&self) -> u64 {
        let seen: HashSet<u64, FixedState> = self.blocks.iter().copied().collect();
        seen.len() as u64
    }
}
