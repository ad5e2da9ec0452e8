//! What an endless cache would hit, from a sketch of the hashes seen: 64 KiB, however many come.
//!
//! The registers are HyperLogLog's (Flajolet et al., 2007). The count is taken as they change ("historic inverse probability", Cohen 2015, Ting
//! 2014): a hash that changes a register stands for as many new ones as were to be expected until one does. So what is new can be
//! counted apart for lookups and for stores. An endless cache has the head of every chain it has, so its hits are all lookups that are not new.

/// Registers, as a power of two: the standard error of a count is below 0.4 %.
const REGISTERS_LOG2: u32 = 16;
const REGISTERS: usize = 1 << REGISTERS_LOG2;

/// Which hashes were seen, approximately.
#[derive(Clone, Debug)]
pub struct Ceiling {
    registers: Box<[u8]>,
    /// The probability that the next new hash changes a register.
    change: f64,
}

impl Ceiling {
    /// A sketch that has seen nothing.
    pub fn new() -> Self {
        Self { registers: vec![0; REGISTERS].into_boxed_slice(), change: 1.0 }
    }

    /// Sees a hash: as how many new ones it counts. Over many hashes the sum is the number of different ones.
    pub fn see(&mut self, hash: u64) -> f64 {
        let register = (hash >> (u64::BITS - REGISTERS_LOG2)) as usize;
        // Zeros behind the register's bits, and one: 1 to 49.
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

/// The probability that a hash changes a register that holds `rank`.
fn chance(rank: u8) -> f64 {
    f64::powi(0.5, i32::from(rank))
}

impl Default for Ceiling {
    fn default() -> Self {
        Self::new()
    }
}
