//! A depot's statistics as series for Prometheus, with type, unit and help.

use std::collections::BTreeMap;
use std::fmt;

use kvdepot_depot::stats::{EVICTIONS_HELP, GAUGES_HELP, Stats};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Unit;
use serde_json::Value;

/// The output of a depot's `stat`, encoded with the prefix `kvdepot`.
#[derive(Debug)]
pub(super) struct Series(pub(super) Value);

/// A value with its labels.
type Sample = (Vec<(&'static str, String)>, f64);

impl Collector for Series {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let stats = &self.0;
        let info = Info::new([
            ("version", env!("CARGO_PKG_VERSION").to_owned()),
            ("pipeline", quoted(stats["pipeline"].as_str().unwrap_or_default())),
        ]);
        info.encode(encoder.encode_descriptor("build", "Version and pipeline.", None, MetricType::Info)?)?;
        let plain = |name: &str| stats[name].as_u64().map(|value| vec![(Vec::new(), value as f64)]);
        for (kind, table) in
            [(Kind::Counter, Stats::HELP), (Kind::Counter, EVICTIONS_HELP), (Kind::Gauge, GAUGES_HELP)]
        {
            for (name, help) in table {
                write(
                    &mut encoder,
                    kind,
                    name,
                    help.trim().trim_end_matches('.'),
                    &plain(name).unwrap_or_default(),
                )?;
            }
        }
        let most =
            |name: &str| stats[name].as_u64().map_or_else(Vec::new, |us| vec![(Vec::new(), us as f64 / 1e6)]);
        let holds = "Longest time that a thread held the depot's lock, in the last one to two minutes";
        write(&mut encoder, Kind::Gauge, "lock_hold_max_seconds", holds, &most("lock_hold_max_us"))?;
        let stall = "Longest time that the machine did not run the depot, since the depot started";
        write(&mut encoder, Kind::Gauge, "stall_max_seconds", stall, &most("stall_max_us"))?;
        let uptime = stats["uptime_s"].as_u64().map_or_else(Vec::new, |s| vec![(Vec::new(), s as f64)]);
        write(&mut encoder, Kind::Gauge, "uptime_seconds", "Time since the depot started", &uptime)?;
        let oldest = "Age of the oldest lease of a client, about; 0 without leases";
        let age = stats["lease_age_max_s"].as_u64().map_or_else(Vec::new, |s| vec![(Vec::new(), s as f64)]);
        write(&mut encoder, Kind::Gauge, "lease_age_max_seconds", oldest, &age)?;
        let ages = "Time from when a block came into the pool until it was evicted, about";
        let evicted = vec![(None, &stats["evict_ages"])];
        histogram(
            &mut encoder,
            "evict_age",
            ages,
            evicted,
            &Of { sum: "sum_s", per_unit: 1.0, ..Of::TIMES },
        )?;
        let on_processor = "Longest processor time of a thread while it held the depot's lock, in the last one to two \
                            minutes";
        write(
            &mut encoder,
            Kind::Gauge,
            "lock_hold_cpu_max_seconds",
            on_processor,
            &most("lock_hold_cpu_max_us"),
        )?;
        write(&mut encoder, Kind::Counter, "failures", "Operations that failed, by kind", &failures(stats))?;
        let misses = "Claims and lookups that were misses or partial hits, by the reason of the first block that they missed";
        write(&mut encoder, Kind::Counter, "miss_requests", misses, &by_reason(stats))?;
        self.flows(&mut encoder)?;
        self.namespaces(&mut encoder)?;
        self.regions(&mut encoder)?;
        self.tiers(&mut encoder)
    }
}

impl Series {
    /// Times of claims, and times and bytes of clients' copies.
    fn flows(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        for (name, field, help) in [
            (
                "claim_wait",
                "admitted",
                "Time from the opening of a claim until its hit was known and the pool had room for it",
            ),
            ("claim", "settled", "Time from the opening of a claim until its hit was final and in the pool"),
        ] {
            histogram(encoder, name, help, vec![(None, &self.0["claim_times"][field])], &Of::TIMES)?;
        }
        let copies = || {
            let label = |operation: &str| Some(("operation", operation.to_owned()));
            ["load", "dump"].map(|operation| (label(operation), &self.0["copies"][operation])).to_vec()
        };
        let times =
            "Time from when a client got blocks until it gave them back: its copy out of the pool or into it";
        histogram(encoder, "copy", times, copies(), &Of::TIMES)?;
        histogram(encoder, "copy", "Bytes of the blocks that a client got together", copies(), &Of::SIZES)
    }

    fn regions(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let regions = self.0["pool_regions"].as_array().map_or(&[][..], Vec::as_slice);
        for (name, field, help) in [
            ("pool_region_bytes", "bytes", "Memory of a pool region"),
            ("pool_region_free_bytes", "free_bytes", "Free memory of a pool region"),
        ] {
            let samples = regions.iter().enumerate().map(|(number, region)| {
                let node = region["node"].as_u64().map_or_else(String::new, |node| node.to_string());
                let labels = vec![("region", number.to_string()), ("node", node)];
                (labels, region[field].as_u64().unwrap_or(0) as f64)
            });
            write(encoder, Kind::Gauge, name, help, &samples.collect::<Vec<_>>())?;
        }
        Ok(())
    }

    /// Of the namespaces that were read most in the last hour: as many as the depot tells of, so their number is bounded.
    fn namespaces(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let top = self.0["top_namespaces"].as_array().map_or(&[][..], Vec::as_slice);
        for (kind, name, help) in [
            (Kind::Gauge, "namespace_pool_bytes", "Memory of the pool that a namespace's blocks take"),
            (Kind::Counter, "namespace_load_bytes", "Bytes of a namespace that loads leased"),
            (
                Kind::Counter,
                "namespace_lookup_blocks",
                "Blocks of a namespace that lookups and settled claims asked for",
            ),
            (Kind::Counter, "namespace_lookup_hit_blocks", "Of these, blocks that were hits"),
            (Kind::Counter, "namespace_misses", "Claims and lookups that ended at a block of a namespace"),
        ] {
            let field = name.trim_start_matches("namespace_");
            let samples = top.iter().map(|one| {
                let text = |field: &str| quoted(one[field].as_str().unwrap_or_default());
                let labels = vec![("namespace", text("namespace")), ("facts", text("facts"))];
                (labels, one[field].as_u64().unwrap_or(0) as f64)
            });
            write(encoder, kind, name, help, &samples.collect::<Vec<_>>())?;
        }
        Ok(())
    }

    fn tiers(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let tiers = self.0["tiers"].as_array().map_or(&[][..], Vec::as_slice);
        for (name, field, help) in [
            ("tier_blocks", "blocks", "Blocks in a tier, if it counts them"),
            ("tier_bytes", "bytes", "Bytes of the blocks in a tier, if it counts them"),
            ("tier_max_bytes", "bytes_max", "Maximum bytes of a tier, if it has a limit"),
            (
                "tier_shared_bytes",
                "shared_bytes",
                "Bytes that all depots of a shared limit store and may store unasked",
            ),
            (
                "tier_shared_granted_bytes",
                "shared_granted_bytes",
                "Bytes of a shared limit that this depot may store unasked",
            ),
            (
                "tier_shared_depots",
                "shared_depots",
                "Depots that share the limit of a tier; 0 while this one stores nothing",
            ),
        ] {
            write(encoder, Kind::Gauge, name, help, &of_tiers(tiers, field, 1.0))?;
        }
        blocks_of_tiers(encoder, tiers)?;
        hops(encoder, tiers)?;
        compression(encoder, tiers)?;
        object_stores(encoder, tiers)?;
        let servers: Vec<&Value> =
            tiers.iter().flat_map(|tier| tier["servers"].as_array().into_iter().flatten()).collect();
        for (kind, name, field, help) in [
            (Kind::Gauge, "remote_server_up", "up", "Whether a pool server or a store is in use"),
            (Kind::Gauge, "remote_server_connections", "connections", "Connections to a pool server"),
            (Kind::Counter, "remote_server_failures", "failures", "Failures of a pool server or of a store"),
        ] {
            let samples = servers.iter().map(|server| {
                let value = server[field].as_bool().map(u64::from).or_else(|| server[field].as_u64());
                let address = quoted(server["address"].as_str().unwrap_or_default());
                (vec![("server", address)], value.unwrap_or(0) as f64)
            });
            write(encoder, kind, name, help, &samples.collect::<Vec<_>>())?;
        }
        Ok(())
    }
}

/// Returns a number of each tier that has it.
fn of_tiers(tiers: &[Value], field: &str, per_unit: f64) -> Vec<Sample> {
    let sample = |tier: &Value| {
        let name = quoted(tier["name"].as_str()?);
        Some((vec![("tier", name)], tier[field].as_u64()? as f64 / per_unit))
    };
    tiers.iter().filter_map(sample).collect()
}

/// Blocks that hits found in each tier, and blocks that it evicted.
fn blocks_of_tiers(encoder: &mut DescriptorEncoder<'_>, tiers: &[Value]) -> fmt::Result {
    for (name, field, help) in [
        (
            "tier_hit_blocks",
            "hit_blocks",
            "Blocks of hits that came from a tier; the others were in the pool",
        ),
        ("tier_evict_blocks", "evict_blocks", "Blocks that a tier evicted to make room"),
    ] {
        write(encoder, Kind::Counter, name, help, &of_tiers(tiers, field, 1.0))?;
    }
    Ok(())
}

/// Blocks that moved between the pool and each tier: their bytes, and histograms of their times.
fn hops(encoder: &mut DescriptorEncoder<'_>, tiers: &[Value]) -> fmt::Result {
    let number = |value: &Value| value.as_u64().unwrap_or(0);
    for (direction, times, bytes, sizes) in [
        (
            "read",
            "Time from the call of a tier until a block was in the pool",
            "Bytes read from a tier",
            "Bytes of a block read from a tier",
        ),
        (
            "write",
            "Time from the call of a tier until it had stored a block",
            "Bytes written to a tier",
            "Bytes of a block written to a tier",
        ),
    ] {
        let field = format!("{direction}s");
        let moved = tiers.iter().filter_map(|tier| {
            let name = quoted(tier["name"].as_str()?);
            Some((("tier", name), tier.get(field.as_str())?))
        });
        let moved: Vec<_> = moved.collect();
        let samples =
            moved.iter().map(|(label, moved)| (vec![label.clone()], number(&moved["bytes"]) as f64));
        let samples: Vec<Sample> = samples.collect();
        write(encoder, Kind::Counter, &format!("tier_{direction}_bytes"), bytes, &samples)?;
        let rows: Vec<_> = moved.iter().map(|(label, moved)| (Some(label.clone()), *moved)).collect();
        histogram(encoder, &format!("tier_{direction}"), times, rows.clone(), &Of::TIMES)?;
        histogram(encoder, &format!("tier_{direction}_block"), sizes, rows, &Of::SIZES)?;
    }
    Ok(())
}

/// What a histogram is of: its fields in `stat`, and how many of their unit one second or byte has.
struct Of {
    unit: Unit,
    buckets: &'static str,
    sum: &'static str,
    per_unit: f64,
}

impl Of {
    const TIMES: Self = Self { unit: Unit::Seconds, buckets: "buckets", sum: "sum_us", per_unit: 1e6 };
    const SIZES: Self = Self { unit: Unit::Bytes, buckets: "sizes", sum: "bytes", per_unit: 1.0 };
}

/// Writes a histogram with a row for each label: `buckets` of pairs, a bound and the count above the bound before it, and
/// their sum. Writes nothing without rows.
fn histogram(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    rows: Vec<(Option<(&str, String)>, &Value)>,
    of: &Of,
) -> fmt::Result {
    let number = |value: &Value| value.as_u64().unwrap_or(0);
    let rows: Vec<_> = rows.into_iter().filter(|(_, row)| row[of.buckets].is_array()).collect();
    if rows.is_empty() {
        return Ok(());
    }
    let help = format!("{help}.");
    let mut metric = encoder.encode_descriptor(name, &help, Some(&of.unit), MetricType::Histogram)?;
    for (label, row) in rows {
        let pairs = row[of.buckets].as_array().into_iter().flatten();
        let bound = |pair: &Value| pair[0].as_u64().map_or(f64::MAX, |bound| bound as f64 / of.per_unit);
        let buckets: Vec<(f64, u64)> = pairs.map(|pair| (bound(pair), number(&pair[1]))).collect();
        let (sum, count) =
            (number(&row[of.sum]) as f64 / of.per_unit, buckets.iter().map(|(_, count)| count).sum());
        type NoLabels = [(&'static str, &'static str); 0];
        match label {
            None => metric.encode_histogram::<NoLabels>(sum, count, &buckets, None)?,
            Some(label) => {
                metric.encode_family(&[label])?.encode_histogram::<NoLabels>(sum, count, &buckets, None)?;
            }
        }
    }
    Ok(())
}

/// Compression of the tiers that compress blocks, or have read compressed ones.
fn compression(encoder: &mut DescriptorEncoder<'_>, tiers: &[Value]) -> fmt::Result {
    for (name, field, per_unit, help) in [
        ("tier_compressed_blocks", "compressed_blocks", 1.0, "Blocks that a tier has written compressed"),
        (
            "tier_uncompressed_blocks",
            "uncompressed_blocks",
            1.0,
            "Blocks that a tier that compresses has written as they are",
        ),
        (
            "tier_compression_input_bytes",
            "compression_input_bytes",
            1.0,
            "Bytes of blocks that a tier that compresses has written, before compression",
        ),
        (
            "tier_compression_output_bytes",
            "compression_output_bytes",
            1.0,
            "Bytes of blocks that a tier that compresses has written, after compression",
        ),
        (
            "tier_compression_cpu_seconds",
            "compression_cpu_us",
            1e6,
            "Processor time of measuring and compressing blocks",
        ),
        ("tier_decompressed_blocks", "decompressed_blocks", 1.0, "Blocks that a tier has decompressed"),
        ("tier_decompressed_bytes", "decompressed_bytes", 1.0, "Bytes of decompressed blocks"),
        (
            "tier_decompression_cpu_seconds",
            "decompression_cpu_us",
            1e6,
            "Processor time of decompressing blocks",
        ),
    ] {
        write(encoder, Kind::Counter, name, help, &of_tiers(tiers, field, per_unit))?;
    }
    Ok(())
}

/// Requests to object stores, as the provider bills them.
fn object_stores(encoder: &mut DescriptorEncoder<'_>, tiers: &[Value]) -> fmt::Result {
    let of = |tier: &Value, field: &str| tier[field].as_u64().map(|value| value as f64);
    let requests = tiers.iter().flat_map(|tier| {
        ["put", "get", "head", "delete", "list"].into_iter().filter_map(move |request| {
            let count = of(tier, &format!("{request}_requests"))?;
            Some((vec![("request", request.to_owned())], count))
        })
    });
    let help = "Requests to an object store, including retries";
    write(encoder, Kind::Counter, "object_requests", help, &requests.collect::<Vec<_>>())?;
    for (name, field, help) in [
        ("object_sent_bytes", "sent_bytes", "Bytes sent to an object store"),
        ("object_received_bytes", "received_bytes", "Bytes received from an object store"),
        ("object_tried_again", "tried_again", "Retried requests to an object store"),
        ("object_slowed_down", "slowed_down", "Throttling answers of an object store"),
        ("object_timeouts", "timeouts", "Requests that an object store did not answer in time"),
        ("object_corrupt_blocks", "corrupt_blocks", "Objects whose content was not the requested block"),
        ("object_written_packs", "written_packs", "Packs of small blocks written to an object store"),
        ("object_packed_blocks", "packed_blocks", "Blocks written to an object store in packs"),
    ] {
        let samples = tiers.iter().filter_map(|tier| Some((Vec::new(), of(tier, field)?)));
        let samples: Vec<Sample> = samples.collect();
        write(encoder, Kind::Counter, name, help, &samples)?;
    }
    Ok(())
}

/// Escapes text for a label: the encoder writes it unchanged.
fn quoted(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// Misses by reason, those that have not happened too.
fn by_reason(stats: &Value) -> Vec<Sample> {
    let counts = stats["misses"].as_object().into_iter().flatten();
    counts
        .map(|(reason, count)| (vec![("reason", quoted(reason))], count.as_u64().unwrap_or(0) as f64))
        .collect()
}

/// Failures that have a sample before the first of them. Otherwise an increase from nothing to one would not be seen.
const FAILURES: [(&str, &[&str]); 4] = [
    ("fetch", &["corrupt", "io", "timeout", "unavailable"]),
    ("probe", &["io", "timeout", "unavailable"]),
    ("remove", &["io", "timeout", "unavailable"]),
    ("write", &["io", "no_space", "timeout", "unavailable"]),
];

/// Failures by operation and kind.
fn failures(stats: &Value) -> Vec<Sample> {
    let mut counts = BTreeMap::new();
    for (operation, kinds) in FAILURES {
        counts.extend(kinds.iter().map(|kind| ((operation.to_owned(), (*kind).to_owned()), 0)));
    }
    for (operation, kinds) in stats["failures"].as_object().into_iter().flatten() {
        for (kind, count) in kinds.as_object().into_iter().flatten() {
            counts.insert((operation.clone(), kind.clone()), count.as_u64().unwrap_or(0));
        }
    }
    let sample = |((operation, kind), count): ((String, String), u64)| {
        (vec![("operation", quoted(&operation)), ("kind", quoted(&kind))], count as f64)
    };
    counts.into_iter().map(sample).collect()
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Counter,
    Gauge,
}

/// Writes a series with its samples, and nothing if it has none. A name that ends in its unit has that as its unit.
fn write(
    encoder: &mut DescriptorEncoder<'_>,
    kind: Kind,
    name: &str,
    help: &str,
    samples: &[Sample],
) -> fmt::Result {
    if samples.is_empty() {
        return Ok(());
    }
    let (stem, unit) = [("_bytes", Unit::Bytes), ("_seconds", Unit::Seconds)]
        .into_iter()
        .find_map(|(end, unit)| Some((name.strip_suffix(end)?, Some(unit))))
        .unwrap_or((name, None));
    let metric_type = match kind {
        Kind::Counter => MetricType::Counter,
        Kind::Gauge => MetricType::Gauge,
    };
    let mut metric = encoder.encode_descriptor(stem, &format!("{help}."), unit.as_ref(), metric_type)?;
    // Labels of a family are written in braces, even if there are none.
    if let [(labels, value)] = samples
        && labels.is_empty()
    {
        return write_value(kind, *value, metric);
    }
    for (labels, value) in samples {
        write_value(kind, *value, metric.encode_family(labels)?)?;
    }
    Ok(())
}

fn write_value(kind: Kind, value: f64, metric: MetricEncoder<'_>) -> fmt::Result {
    match kind {
        Kind::Counter if value.fract() == 0.0 => ConstCounter::new(value as u64).encode(metric),
        Kind::Counter => ConstCounter::new(value).encode(metric),
        Kind::Gauge if value.fract() == 0.0 => ConstGauge::new(value as i64).encode(metric),
        Kind::Gauge => ConstGauge::new(value).encode(metric),
    }
}
