//! Estimates the hits of an endless cache, from a sketch of the hashes seen. It takes 64 KiB for any number of hashes.
//!
//! The registers are HyperLogLog's (Flajolet et al., 2007). They are counted as they change ("historic inverse
//! probability", Cohen 2015, Ting 2014): a hash that changes a register counts as the expected number of new hashes
//! until one changes a register. So new hashes can be counted separately for lookups and for stores. An endless cache
//! has the head of every chain that it stores, so its hits are all lookups that are not new.

/// Number of registers, as a power of two. The standard error of a count is below 0.4 %.
const REGISTERS_LOG2: u32 = 16;
const REGISTERS: usize = 1 << REGISTERS_LOG2;

/// Approximate set of the hashes seen.
#[derive(Clone, Debug)]
pub struct Ceiling {
    registers: Box<[u8]>,
    /// The probability that the next new hash changes a register.
    change: f64,
}

impl Ceiling {
    /// Makes an empty sketch.
    pub fn new() -> Self {
        Self { registers: vec![0; REGISTERS].into_boxed_slice(), change: 1.0 }
    }

    /// Adds a hash. Returns the number of new hashes that it counts as. Over many hashes the sum is the number of
    /// distinct ones.
    pub fn see(&mut self, hash: u64) -> f64 {
        let register = (hash >> (u64::BITS - REGISTERS_LOG2)) as usize;
        // Zeros after the register's bits, plus one: 1 to 49.
        let rank = ((hash << REGISTERS_LOG2) | (1 << (REGISTERS_LOG2 - 1))).leading_zeros() as u8 + 1;
        let before = self.registers[register];
        if rank <= before {
            return 0.0;
        }
        self.registers[register] = rank;
        let counts = 1.0 / self.change;
        self.change -= (chance(before) - chance(rank)) / REGISTERS as f64;
        counts
    }
}

/// Returns the probability that a hash changes a register that holds `rank`.
fn chance(rank: u8) -> f64 {
    f64::powi(0.5, i32::from(rank))
}

impl Default for Ceiling {
    fn default() -> Self {
        Self::new()
    }
}
