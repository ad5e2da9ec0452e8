use super::*;

const GIB: u64 = 1 << 30;

fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for (path, text) in files {
        let path = root.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    root
}

const fn sizes(pool_bytes: u64, pool_bytes_max: u64) -> Sizes {
    Sizes { pool_bytes, pool_bytes_max }
}

#[test]
fn version_2_takes_the_lowest_limit_up_to_the_root() {
    let root = tree(&[
        ("proc/self/cgroup", "0::/system.slice/kv.service\n"),
        ("sys/fs/cgroup/cgroup.controllers", "memory\n"),
        ("sys/fs/cgroup/system.slice/memory.max", "8589934592\n"),
        ("sys/fs/cgroup/system.slice/memory.high", "max\n"),
        ("sys/fs/cgroup/system.slice/kv.service/memory.max", "17179869184\n"),
        ("sys/fs/cgroup/system.slice/kv.service/memory.high", "4294967296\n"),
        ("sys/fs/cgroup/system.slice/kv.service/memory.current", "1234\n"),
    ]);
    let memory = Memory::read(root.path());
    let dir = root.path().join("sys/fs/cgroup/system.slice");
    assert_eq!(memory.path.as_deref(), Some("/system.slice/kv.service"));
    assert_eq!(memory.limit, Some(Limit { bytes: 8 * GIB, file: dir.join("memory.max") }));
    assert_eq!(memory.high, Some(Limit { bytes: 4 * GIB, file: dir.join("kv.service/memory.high") }));
    assert_eq!(memory.current_bytes, Some(1234));
}

#[test]
fn version_1_is_read_where_the_controller_is_and_knows_its_way_to_say_no_limit() {
    let root = tree(&[
        ("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/elsewhere\n"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
        ("sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", "2147483648\n"),
        ("sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes", "77\n"),
    ]);
    let memory = Memory::read(root.path());
    assert_eq!(memory.limit.map(|limit| limit.bytes), Some(2 * GIB));
    assert_eq!((memory.path.as_deref(), memory.current_bytes), (Some("/docker/abc"), Some(77)));
}

#[test]
fn a_container_that_sees_its_own_cgroup_as_the_root_is_read_there() {
    for path in ["/", "/../../pod/abc", "/kubepods/pod/abc"] {
        let root = tree(&[
            ("proc/self/cgroup", &format!("0::{path}\n")),
            ("sys/fs/cgroup/memory.max", "1073741824\n"),
            ("memory.max", "1"),
        ]);
        assert_eq!(Memory::read(root.path()).limit.map(|limit| limit.bytes), Some(GIB), "{path}");
    }
}

#[test]
fn what_cannot_be_read_limits_nothing() {
    for text in ["", "nonsense\n", "0::/a\n", "1:memory\n"] {
        let root = tree(&[("proc/self/cgroup", text), ("sys/fs/cgroup/a/memory.max", "twelve\n")]);
        let memory = Memory::read(root.path());
        assert_eq!((memory.limit, memory.high, memory.current_bytes), (None, None, None), "{text}");
    }
    assert_eq!(Memory::read(Path::new("/nonexistent")), Memory::default());
}

#[test]
fn a_limit_of_huge_pages_is_found() {
    let root = tree(&[("proc/self/cgroup", "0::/a\n"), ("sys/fs/cgroup/a/hugetlb.2MB.max", "0\n")]);
    assert_eq!(huge_page_limit(root.path()).map(|limit| limit.bytes), Some(0));
    let root = tree(&[("proc/self/cgroup", "0::/a\n"), ("sys/fs/cgroup/a/hugetlb.2MB.max", "max\n")]);
    assert_eq!(huge_page_limit(root.path()), None);
}

#[test]
fn available_memory_is_read_in_bytes() {
    let root = tree(&[("proc/meminfo", "MemTotal: 9 kB\nMemAvailable:   2048 kB\n")]);
    assert_eq!(available_bytes(root.path()), Some(2 << 20));
    assert_eq!(available_bytes(tree(&[("proc/meminfo", "MemAvailable: x kB\n")]).path()), None);
}

fn limited(bytes: u64) -> Memory {
    Memory { limit: Some(Limit { bytes, file: "/limit".into() }), ..Memory::default() }
}

#[test]
fn a_pool_beyond_the_hard_limit_is_refused_and_both_sizes_are_named() {
    let error = fit(&mut sizes(5 * GIB, 0), &limited(4 * GIB), None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    let text = error.to_string();
    for said in [(5 * GIB).to_string(), (4 * GIB).to_string(), "/limit".into(), "pool_gb".into()] {
        assert!(text.contains(&said), "{text} says nothing of {said}");
    }
    assert!(fit(&mut sizes(4 * GIB, 0), &limited(4 * GIB), None).is_ok());
}

#[test]
fn a_pool_that_leaves_little_is_warned_of() {
    let warnings =
        |pool, memory: &Memory, available| fit(&mut sizes(pool, 0), memory, available).unwrap().len();
    assert_eq!(warnings(3 * GIB, &limited(4 * GIB), Some(4 * GIB)), 0);
    assert_eq!(warnings(7 * GIB / 2, &limited(4 * GIB), None), 1);
    assert_eq!(warnings(7 * GIB / 2, &limited(4 * GIB), Some(4 * GIB)), 2);
    let high = Memory { high: limited(GIB).limit, ..Memory::default() };
    assert_eq!(warnings(2 * GIB, &high, Some(8 * GIB)), 1);
}

#[test]
fn a_pool_grows_no_further_than_its_cgroup_bears() {
    let mut grows = sizes(GIB, 64 * GIB);
    assert_eq!(fit(&mut grows, &limited(10 * GIB), None).unwrap().len(), 1);
    assert!(grows.pool_bytes_max <= 8 * GIB && grows.pool_bytes_max > 7 * GIB, "{}", grows.pool_bytes_max);
    let mut fits = sizes(GIB, 2 * GIB);
    assert!(fit(&mut fits, &limited(10 * GIB), None).unwrap().is_empty());
    assert_eq!(fits.pool_bytes_max, 2 * GIB);
}
