//! Ratios and rates of the encodings, on one thread: `cargo run --release -p kvdepot-tier --example encoding_rates --
//! [blocks] [rounds]`.
//!
//! The KV is generated, with what measurements of models agree on: keys have a mean and a scale of their own in each
//! channel, a few channels are ten times as large, and rotary embeddings then mix pairs of channels by position; values
//! have nearly the same scale in all channels; and tokens differ in scale. A block has 16 tokens of 32 layers with 8 KV
//! heads of 128 channels, as Llama 3 8B has. Mantissas are noise in any case, so the ratio depends on how far the scales
//! are apart: the generator errs on the side of far.

use std::time::Duration;

use kvdepot_core::Result;
use kvdepot_io::thread_time::thread_time;
use kvdepot_tier::encoding::{Encoder, Encoding, decode};

const TOKENS: usize = 16;
const LAYERS: usize = 32;
const HEADS: usize = 8;
const CHANNELS: usize = 128;
const ROPE_BASE: f32 = 500_000.0;
/// One channel in this many is an outlier.
const OUTLIERS: u64 = 32;

struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn uniform(&mut self) -> f32 {
        ((self.bits() >> 40) as f32 + 0.5) / (1 << 24) as f32
    }

    /// A sample of the standard normal distribution, by Box and Muller.
    fn normal(&mut self) -> f32 {
        (-2.0 * self.uniform().ln()).sqrt() * (std::f32::consts::TAU * self.uniform()).cos()
    }

    fn log_normal(&mut self, sigma: f32) -> f32 {
        (sigma * self.normal()).exp()
    }
}

/// Means and scales of one layer's keys and scales of its values, by head and channel.
struct Layer {
    means: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl Layer {
    fn new(random: &mut Random) -> Self {
        let (mut means, mut keys, mut values) = (Vec::new(), Vec::new(), Vec::new());
        let values_scale = 0.5 * random.log_normal(0.5);
        for _ in 0..HEADS * CHANNELS {
            let outlier = if random.bits().is_multiple_of(OUTLIERS) { 10.0 } else { 1.0 };
            means.push(outlier * random.normal());
            keys.push(outlier.sqrt() * random.log_normal(0.5));
            values.push(values_scale * random.log_normal(0.3));
        }
        Self { means, keys, values }
    }
}

/// The numbers of a block: by layer, all keys, then all values, by token, head and channel.
fn block(layers: &[Layer], number: usize, random: &mut Random) -> Vec<f32> {
    let mut out = Vec::with_capacity(LAYERS * 2 * TOKENS * HEADS * CHANNELS);
    for layer in layers {
        let scales: Vec<f32> = (0..TOKENS).map(|_| random.log_normal(0.2)).collect();
        for token in 0..TOKENS {
            let position = (number * TOKENS + token) as f32;
            for head in 0..HEADS {
                let at = head * CHANNELS;
                let key: Vec<f32> = (at..at + CHANNELS)
                    .map(|channel| layer.means[channel] + layer.keys[channel] * random.normal())
                    .collect();
                let half = CHANNELS / 2;
                let turn = |pair: usize| {
                    let angle = position * ROPE_BASE.powf(-(pair as f32) / half as f32);
                    (angle.cos(), angle.sin(), key[pair], key[pair + half])
                };
                out.extend((0..half).map(turn).map(|(cos, sin, x, y)| x * cos - y * sin));
                out.extend((0..half).map(turn).map(|(cos, sin, x, y)| y * cos + x * sin));
            }
        }
        for scale in scales {
            out.extend(layer.values.iter().map(|value| scale * value * random.normal()));
        }
    }
    out
}

/// Rounds to a floating-point number of these bits, which has subnormals and saturates.
fn round(number: f32, exponent_bits: i32, mantissa_bits: i32) -> u16 {
    let bias = (1 << (exponent_bits - 1)) - 1;
    let sign = u16::from(number.is_sign_negative()) << (exponent_bits + mantissa_bits);
    let number = number.abs();
    let exponent = (number.log2().floor() as i32).clamp(1 - bias, bias + 1);
    // A mantissa that rounds up carries into the exponent.
    let steps = (number / 2_f32.powi(exponent - mantissa_bits)).round_ties_even() as i32;
    let biased = (exponent + bias - 1) << mantissa_bits;
    let most = (1 << (exponent_bits + mantissa_bits)) - 2;
    sign | (biased + steps).min(most) as u16
}

fn bytes_of(kind: &str, numbers: &[f32], random: &mut Random) -> Vec<u8> {
    let two = |exponent, mantissa| {
        numbers.iter().flat_map(|number| round(*number, exponent, mantissa).to_le_bytes()).collect()
    };
    match kind {
        "bfloat16" => two(8, 7),
        "float16" => two(5, 10),
        "FP8 E4M3" => numbers.iter().map(|number| round(*number, 4, 3) as u8).collect(),
        "FP8 E5M2" => numbers.iter().map(|number| round(*number, 5, 2) as u8).collect(),
        _ => (0..2 * numbers.len()).map(|_| random.bits() as u8).collect(),
    }
}

/// Returns the bytes stored, and the processor time of encoding and of decoding.
fn measure(encoding: Encoding, block: &[u8], out: &mut [u8]) -> Result<(usize, Duration, Duration)> {
    let began = thread_time();
    let read = |at: usize, piece: &mut [u8]| piece.copy_from_slice(&block[at..at + piece.len()]);
    let stored = Encoder::new(encoding)?.block(block.len(), read, out);
    let encoded = thread_time();
    let Some(stored) = stored else { return Ok((block.len(), encoded - began, Duration::ZERO)) };
    let mut back = vec![0; block.len()];
    let decoding = thread_time();
    decode(encoding, &out[..stored], block.len(), |at, piece| {
        back[at..at + piece.len()].copy_from_slice(piece);
    })?;
    let decoded = thread_time();
    assert!(back == block, "a block came back with other bytes");
    Ok((stored, encoded - began, decoded - decoding))
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1).map(|text| text.parse().ok());
    let (blocks, rounds) =
        (arguments.next().flatten().unwrap_or(16_usize), arguments.next().flatten().unwrap_or(3_usize));
    let mut random = Random(1);
    let layers: Vec<Layer> = (0..LAYERS).map(|_| Layer::new(&mut random)).collect();
    let numbers: Vec<Vec<f32>> = (0..blocks).map(|number| block(&layers, number, &mut random)).collect();
    println!("{blocks} blocks, best of {rounds} rounds, one thread, MB/s of plain bytes by processor time");
    println!("| KV | encoding | stored | ratio | encode | decode |");
    println!("| --- | --- | ---: | ---: | ---: | ---: |");
    for kind in ["bfloat16", "float16", "FP8 E4M3", "FP8 E5M2", "random bytes"] {
        let plain: Vec<Vec<u8>> = numbers.iter().map(|block| bytes_of(kind, block, &mut random)).collect();
        let total: usize = plain.iter().map(Vec::len).sum();
        let mut out = vec![0; plain.first().map_or(0, |block| block.len() + block.len() / 8 + 64)];
        for encoding in Encoding::ALL {
            let (mut stored, mut encode, mut decode) = (0, Duration::MAX, Duration::MAX);
            for _ in 0..rounds {
                let (mut bytes, mut encoding_time, mut decoding_time) = (0, Duration::ZERO, Duration::ZERO);
                for block in &plain {
                    let (length, encoded, decoded) = measure(encoding, block, &mut out)?;
                    bytes += length;
                    encoding_time += encoded;
                    decoding_time += decoded;
                }
                stored = bytes;
                encode = encode.min(encoding_time);
                decode = decode.min(decoding_time);
            }
            let rate = |took: Duration| match took {
                Duration::ZERO => "–".to_owned(),
                _ => format!("{:.0}", total as f64 / took.as_secs_f64() / 1e6),
            };
            let percent = 100.0 * stored as f64 / total as f64;
            let ratio = total as f64 / stored as f64;
            println!(
                "| {kind} | {encoding:?} | {percent:.1} % | {ratio:.2} | {} | {} |",
                rate(encode),
                rate(decode)
            );
        }
    }
    Ok(())
}
