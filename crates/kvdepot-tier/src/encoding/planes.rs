//! Splits two-byte floating-point numbers into a plane of exponents and one of mantissas.
//!
//! A number's bits are rotated by one to the left first. Then the high byte of a bfloat16 is its exponent, and the low
//! byte its mantissa and sign. Of an IEEE half, the high byte has the exponent and the first bits of the mantissa.

/// Splits `chunk`: number `i` into `high[i]` and `low[i]`. An odd byte at the end follows in `low`.
pub(super) fn split(chunk: &[u8], high: &mut [u8], low: &mut [u8]) {
    let (numbers, odd) = chunk.as_chunks::<2>();
    let (low, last) = low.split_at_mut(numbers.len());
    for ((number, high), low) in numbers.iter().zip(high).zip(low) {
        let [first, second] = u16::from_le_bytes(*number).rotate_left(1).to_le_bytes();
        (*low, *high) = (first, second);
    }
    last.copy_from_slice(odd);
}

/// The inverse of [`split`].
pub(super) fn join(high: &[u8], low: &[u8], chunk: &mut [u8]) {
    let (numbers, odd) = chunk.as_chunks_mut::<2>();
    let (low, last) = low.split_at(numbers.len());
    for ((number, high), low) in numbers.iter_mut().zip(high).zip(low) {
        *number = u16::from_le_bytes([*low, *high]).rotate_right(1).to_le_bytes();
    }
    odd.copy_from_slice(last);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bfloat16_is_split_into_its_exponent_and_the_rest() {
        // -1.5 in bfloat16: sign 1, exponent 127, mantissa 0b1000000.
        let bytes = 0xbfc0_u16.to_le_bytes();
        let (mut high, mut low) = ([0], [0]);
        split(&bytes, &mut high, &mut low);
        assert_eq!((high, low), ([127], [0b1000_0001]));
    }

    #[test]
    fn what_was_split_is_joined() {
        for bytes in [0, 1, 2, 3, 64, 65, 1000, 1001] {
            let chunk: Vec<u8> = (0..bytes).map(|n| (n * 151 % 256) as u8).collect();
            let (mut high, mut low) = (vec![0; bytes / 2], vec![0; bytes - bytes / 2]);
            split(&chunk, &mut high, &mut low);
            let mut joined = vec![0; bytes];
            join(&high, &low, &mut joined);
            assert_eq!(joined, chunk);
        }
    }
}
