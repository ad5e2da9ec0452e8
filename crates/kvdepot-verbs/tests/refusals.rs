//! Errors for missing things: one sentence each, with advice.
#![allow(missing_docs, reason = "a test")]

use std::path::Path;

use kvdepot_core::{Error, ErrorKind};
use kvdepot_standin_verbs::StandIn;
use kvdepot_verbs::{Access, Buffer, Context, GidType, LinkLayer, Mr, Pd, PortChoice, Verbs};

fn says(error: &Error, kind: ErrorKind, words: &[&str]) {
    let text = error.to_string();
    assert_eq!(error.kind(), kind, "{text}");
    assert!(words.iter().all(|word| text.contains(word)), "{text} does not say {words:?}");
    assert_eq!(text.lines().count(), 1, "{text}");
}

#[test]
fn no_library() {
    let error = Verbs::load_from(Path::new("/nowhere/libibverbs.so.1")).expect_err("it is not there");
    says(&error, ErrorKind::Unsupported, &["libibverbs was not found", "install rdma-core", "/nowhere/"]);
}

#[test]
fn a_library_of_another_kind() {
    let error = Verbs::load_from(Path::new("libc.so.6")).expect_err("no verbs in it");
    says(&error, ErrorKind::Unsupported, &["a function is missing", "symbol=ibv_get_device_list"]);
}

#[test]
fn no_device() {
    let standin = StandIn::new(1);
    let verbs = Verbs::load_from(standin.path()).expect("loads");
    standin.set("devices", 0);
    says(&verbs.devices().expect_err("none"), ErrorKind::Unavailable, &["there is no RDMA device"]);
    standin.set("devices", 2);
    standin.fail("ibv_get_device_list", 0, 1, libc::ENOSYS);
    says(&verbs.devices().expect_err("no kernel support"), ErrorKind::Unavailable, &["modprobe"]);
    let error = verbs.device("mlx5_7").expect_err("another name");
    says(&error, ErrorKind::Config, &["mlx5_7", "devices=standin0 standin1"]);
}

#[test]
fn a_port_that_is_down_or_of_another_kind() {
    let standin = StandIn::new(1);
    let verbs = Verbs::load_from(standin.path()).expect("loads");
    standin.set("port_state", 1);
    let error = PortChoice::default().open(&verbs).expect_err("down");
    says(&error, ErrorKind::Unavailable, &["no port of the RDMA device is up", "1: down", "standin0"]);
    standin.set("port_state", 4);
    let choice = PortChoice { link: Some(LinkLayer::Ethernet), ..PortChoice::default() };
    says(&choice.open(&verbs).expect_err("InfiniBand"), ErrorKind::Unavailable, &["active InfiniBand"]);
}

/// RoCE: version 2 over IPv4, unless another entry of the table is requested.
#[test]
fn the_address_of_a_port() {
    let standin = StandIn::new(1);
    standin.set("ethernet", 1);
    let verbs = Verbs::load_from(standin.path()).expect("loads");
    let (context, port) = PortChoice::default().open(&verbs).expect("up");
    let gid = port.gid.expect("an address");
    assert_eq!(
        (gid.index, gid.kind, gid.is_ipv4(), port.link),
        (2, GidType::RoceV2, true, LinkLayer::Ethernet)
    );
    let find = |index| PortChoice { gid_index: Some(index), ..PortChoice::default() }.find(&context);
    assert_eq!(find(1).expect("there").gid.map(|gid| gid.kind), Some(GidType::RoceV1));
    says(&find(9).expect_err("past the table"), ErrorKind::Config, &["gid_index=9"]);
}

#[test]
fn memory_that_cannot_be_registered() {
    let standin = StandIn::new(1);
    let verbs = Verbs::load_from(standin.path()).expect("loads");
    let device = verbs.devices().expect("one").remove(0);
    let pd = Pd::new(&Context::open(&device).expect("opens")).expect("a domain");
    standin.set("region_bytes_max", 64 << 10);
    let error = Buffer::new(&pd, 1 << 20, Access::ALL).expect_err("over the limit");
    says(
        &error,
        ErrorKind::Permission,
        &["RLIMIT_MEMLOCK", "locked_bytes_max=", "len_bytes=1048576", "ibv_reg_mr"],
    );
    // SAFETY: an unused address: the registration is refused, so nothing is touched.
    let error = unsafe { Mr::register_peer(&pd, 0x7000_0000_0000_0000, 4096, Access::ALL) };
    says(&error.expect_err("no peer memory"), ErrorKind::Unsupported, &["nvidia-peermem"]);
    standin.set("dmabuf", 0);
    let file = tempfile::tempfile().expect("a file");
    // SAFETY: as above.
    let error =
        unsafe { Mr::register_dmabuf(&pd, std::os::fd::AsFd::as_fd(&file), 0, 4096, 0x1000, Access::ALL) };
    says(&error.expect_err("no dma-buf"), ErrorKind::Unsupported, &["dma-buf"]);
}
