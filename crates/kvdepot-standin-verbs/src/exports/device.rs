//! Devices, contexts, ports and domains.

use std::ffi::{CStr, c_char, c_int};

use kvdepot_verbs::sys::{
    IBV_GID_TYPE_IB, IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2, IBV_MTU_4096, IBV_NODE_CA, IBV_TRANSPORT_IB,
    ibv_context, ibv_device, ibv_device_attr, ibv_gid, ibv_gid_entry, ibv_pd, ibv_port_attr,
};

use super::{null, posting, set_errno};
use crate::config::Config;
use crate::engine;
use crate::state::lock;

/// Maximum size of a queue, and of a completion queue.
pub(super) const QUEUE_MAX: u32 = 16_384;
pub(super) const COMPLETIONS_MAX: i32 = 65_536;
pub(super) const SGES_MAX: u32 = 16;
pub(super) const READS_MAX: u8 = 16;

/// Returns an entry of an Ethernet port's address table: link-local, then IPv4 in both versions.
fn gid(config: &Config, index: u32) -> Option<([u8; 16], u32)> {
    let ipv4 = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 0, 0, 1];
    let link_local = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0xff, 0xfe, 0, 0, 1];
    match (config.ethernet(), index) {
        (false, 0) => Some((link_local, IBV_GID_TYPE_IB)),
        (true, 0) => Some((link_local, IBV_GID_TYPE_ROCE_V2)),
        (true, 1) => Some((ipv4, IBV_GID_TYPE_ROCE_V1)),
        (true, 2) => Some((ipv4, IBV_GID_TYPE_ROCE_V2)),
        _ => None,
    }
}

/// Returns whether `raw` at `index` of the own table can be used for a connection to `dgid`.
pub(super) fn reaches(config: &Config, index: u8, dgid: [u8; 16]) -> bool {
    gid(config, index.into()).is_some() && (0..4).any(|other| gid(config, other).is_some_and(|g| g.0 == dgid))
}

fn copy_text(to: &mut [c_char], text: &str) {
    let room = to.len() - 1;
    for (place, byte) in to.iter_mut().zip(text.bytes().take(room)) {
        *place = byte.cast_signed();
    }
}

#[unsafe(no_mangle)]
extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    let mut state = lock();
    if let Some(errno) = state.fault("ibv_get_device_list") {
        return null(errno);
    }
    let mut list: Vec<*mut ibv_device> = Vec::new();
    for index in 0..state.config.devices {
        let name = state.config.device_name(index);
        let mut device = ibv_device {
            _ops: [std::ptr::null_mut(); 2],
            node_type: IBV_NODE_CA,
            transport_type: IBV_TRANSPORT_IB,
            name: [0; 64],
            dev_name: [0; 64],
            dev_path: [0; 256],
            ibdev_path: [0; 256],
        };
        copy_text(&mut device.name, &name);
        copy_text(&mut device.dev_name, &format!("uverbs{index}"));
        copy_text(&mut device.ibdev_path, &state.config.sysfs.join(&name).to_string_lossy());
        list.push(Box::into_raw(Box::new(device)));
    }
    if !count.is_null() {
        // SAFETY: the caller's place for the count.
        unsafe { *count = list.len() as c_int };
    }
    list.push(std::ptr::null_mut());
    Box::into_raw(list.into_boxed_slice()).cast()
}

#[unsafe(no_mangle)]
extern "C" fn ibv_free_device_list(list: *mut *mut ibv_device) {
    // Devices are not freed, because an open context may still refer to one. A test's few hundred bytes do not matter.
    let mut len = 1;
    // SAFETY: made above, ended by null.
    unsafe {
        while !(*list.add(len - 1)).is_null() {
            len += 1;
        }
        drop(Box::from_raw(std::ptr::slice_from_raw_parts_mut(list, len)));
    }
}

#[unsafe(no_mangle)]
extern "C" fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
    // SAFETY: a device of the list.
    unsafe { (&raw const (*device).name).cast() }
}

#[unsafe(no_mangle)]
extern "C" fn ibv_get_device_guid(device: *mut ibv_device) -> u64 {
    // SAFETY: as above; the name ends with zero.
    let name = unsafe { CStr::from_ptr(ibv_get_device_name(device)) };
    let sum = name.to_bytes().iter().fold(0u64, |sum, &byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
    (0x5200_0000_0000_0000 | sum & 0xffff_ffff).to_be()
}

#[unsafe(no_mangle)]
extern "C" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    let mut state = lock();
    if let Some(errno) = state.fault("ibv_open_device") {
        return null(errno);
    }
    state.contexts += 1;
    engine::start(&mut state);
    // SAFETY: a device of the list, which lives during the call; its name ends with a zero.
    let name = unsafe { CStr::from_ptr(ibv_get_device_name(device)) }.to_string_lossy().into_owned();
    let index = (0..state.config.devices).find(|&index| state.config.device_name(index) == name);
    let context = Box::into_raw(Box::new(ibv_context {
        device,
        ops: posting::operations(),
        cmd_fd: -1,
        async_fd: -1,
        num_comp_vectors: 1,
        mutex: libc::PTHREAD_MUTEX_INITIALIZER,
        abi_compat: std::ptr::null_mut(),
    }));
    state.device_of.insert(context as usize, index.unwrap_or_default());
    context
}

#[unsafe(no_mangle)]
extern "C" fn ibv_close_device(context: *mut ibv_context) -> c_int {
    let mut state = lock();
    state.contexts = state.contexts.saturating_sub(1);
    state.device_of.remove(&(context as usize));
    let left = state.objects() - u64::from(state.contexts);
    if state.contexts == 0 && left > 0 {
        state.violation(format!("the device was closed with {left} objects on it"));
    }
    // SAFETY: made by `ibv_open_device`, closed once.
    drop(unsafe { Box::from_raw(context) });
    0
}

#[unsafe(no_mangle)]
extern "C" fn ibv_query_device(_context: *mut ibv_context, attributes: *mut ibv_device_attr) -> c_int {
    if let Some(errno) = lock().fault("ibv_query_device") {
        return errno;
    }
    // SAFETY: the caller's place; every member is a number, for which zero is a value.
    unsafe {
        std::ptr::write_bytes(attributes, 0, 1);
        let attributes = &mut *attributes;
        copy_text(&mut attributes.fw_ver, "standin");
        attributes.max_mr_size = u64::MAX;
        attributes.page_size_cap = 4096;
        attributes.max_qp = 4096;
        attributes.max_qp_wr = QUEUE_MAX.cast_signed();
        attributes.max_sge = SGES_MAX.cast_signed();
        attributes.max_sge_rd = SGES_MAX.cast_signed();
        attributes.max_cq = 4096;
        attributes.max_cqe = COMPLETIONS_MAX;
        attributes.max_mr = 1 << 20;
        attributes.max_pd = 4096;
        attributes.max_qp_rd_atom = READS_MAX.into();
        attributes.max_qp_init_rd_atom = READS_MAX.into();
        attributes.max_srq = 1024;
        attributes.max_srq_wr = QUEUE_MAX.cast_signed();
        attributes.max_srq_sge = SGES_MAX.cast_signed();
        attributes.max_pkeys = 1;
        attributes.phys_port_cnt = 1;
    }
    0
}

/// `IBV_PORT_DOWN`.
const PORT_DOWN: u32 = 1;

#[unsafe(no_mangle)]
extern "C" fn ibv_query_port(context: *mut ibv_context, port: u8, attributes: *mut ibv_port_attr) -> c_int {
    let mut state = lock();
    if let Some(errno) = state.fault("ibv_query_port") {
        return errno;
    }
    if port != 1 {
        return libc::EINVAL;
    }
    let ethernet = state.config.ethernet();
    // SAFETY: the caller's place, of which this symbol fills the members up to `flags`.
    let attributes = unsafe { &mut *attributes };
    // The device itself was freed with its list.
    let device = state.device_of.get(&(context as usize)).copied().unwrap_or_default();
    let is_down = state.config.ports_down >> device & 1 == 1;
    attributes.state = if is_down { PORT_DOWN } else { state.config.port_state };
    attributes.max_mtu = IBV_MTU_4096;
    attributes.active_mtu = IBV_MTU_4096;
    attributes.gid_tbl_len = 4;
    attributes.max_msg_sz = 1 << 30;
    attributes.pkey_tbl_len = 1;
    attributes.lid = u16::from(!ethernet);
    attributes.link_layer = state.config.link;
    0
}

#[unsafe(no_mangle)]
extern "C" fn ibv_query_gid(_context: *mut ibv_context, port: u8, index: c_int, out: *mut ibv_gid) -> c_int {
    let mut state = lock();
    if let Some(errno) = state.fault("ibv_query_gid") {
        set_errno(errno);
        return -1;
    }
    if port != 1 || !(0..4).contains(&index) {
        set_errno(libc::EINVAL);
        return -1;
    }
    let raw = gid(&state.config, index.cast_unsigned()).map_or([0; 16], |gid| gid.0);
    // SAFETY: the caller's place.
    unsafe { *out = ibv_gid { raw } };
    0
}

#[unsafe(no_mangle)]
extern "C" fn _ibv_query_gid_ex(
    _context: *mut ibv_context,
    port: u32,
    index: u32,
    entry: *mut ibv_gid_entry,
    _flags: u32,
    entry_size: usize,
) -> c_int {
    let mut state = lock();
    if let Some(errno) = state.fault("_ibv_query_gid_ex") {
        return errno;
    }
    if port != 1 || entry_size < size_of::<ibv_gid_entry>() {
        return libc::EINVAL;
    }
    let Some((raw, gid_type)) = gid(&state.config, index) else { return libc::ENODATA };
    // SAFETY: the caller's place, at least as large.
    unsafe {
        *entry = ibv_gid_entry {
            gid: ibv_gid { raw },
            gid_index: index,
            port_num: port,
            gid_type,
            ndev_ifindex: 0,
        };
    }
    0
}

#[unsafe(no_mangle)]
extern "C" fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    let mut state = lock();
    if let Some(errno) = state.fault("ibv_alloc_pd") {
        return null(errno);
    }
    let pd = Box::into_raw(Box::new(ibv_pd { context, handle: 0 }));
    state.pds.insert(pd as usize, 0);
    pd
}

#[unsafe(no_mangle)]
extern "C" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    let mut state = lock();
    match state.pds.get(&(pd as usize)) {
        Some(0) => {
            state.pds.remove(&(pd as usize));
            // SAFETY: made by `ibv_alloc_pd`, freed once, as the table says.
            drop(unsafe { Box::from_raw(pd) });
            0
        }
        Some(_) => {
            state.violation("a protection domain in use was freed".to_owned());
            libc::EBUSY
        }
        None => libc::EINVAL,
    }
}

#[unsafe(no_mangle)]
extern "C" fn ibv_fork_init() -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn ibv_wc_status_str(status: u32) -> *const c_char {
    let text = match status {
        0 => c"success",
        1 => c"local length error",
        2 => c"local QP operation error",
        4 => c"local protection error",
        5 => c"Work Request Flushed Error",
        9 => c"remote invalid request error",
        10 => c"remote access error",
        11 => c"remote operation error",
        12 => c"transport retry counter exceeded",
        13 => c"RNR retry counter exceeded",
        _ => c"other error",
    };
    text.as_ptr()
}
