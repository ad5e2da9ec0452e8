//! The behaviour of a kernel queue that engines rely on: every operation completes exactly once, with its result, and
//! its token identifies its memory until then.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use kvdepot_io::AlignedBuf;
use kvdepot_io::kernel::{AioQueue, Completion, Entry, KernelQueue, UringQueue, Work};

const LONG: Duration = Duration::from_secs(60);
const BYTES: usize = 64 << 10;

fn queues() -> Vec<Box<dyn KernelQueue>> {
    let mut queues: Vec<Box<dyn KernelQueue>> = Vec::new();
    match AioQueue::new(8) {
        Ok(queue) => queues.push(Box::new(queue)),
        Err(error) => eprintln!("aio is not tested: {error}"),
    }
    match UringQueue::new(8) {
        Ok(queue) => queues.push(Box::new(queue)),
        Err(error) => eprintln!("io_uring is not tested: {error}"),
    }
    queues
}

fn pieces(buf: &mut AlignedBuf) -> [libc::iovec; 2] {
    let (len, at) = (buf.len() / 2, buf.as_mut_ptr());
    // SAFETY: the middle of the buffer.
    let middle = unsafe { at.add(len) };
    [libc::iovec { iov_base: at.cast(), iov_len: len }, libc::iovec { iov_base: middle.cast(), iov_len: len }]
}

fn push(queue: &mut dyn KernelQueue, token: u64, fd: i32, work: Work, pieces: &[libc::iovec], offset: u64) {
    // SAFETY: each test keeps everything that it names until it has waited for the completion.
    unsafe { queue.push(Entry { token, fd, work, pieces, offset }) }.unwrap();
}

fn next(queue: &mut dyn KernelQueue) -> Completion {
    let mut out = Vec::new();
    let until = Instant::now() + LONG;
    while out.is_empty() {
        assert!(Instant::now() < until, "nothing completed in {queue:?}");
        queue.wait(Some(LONG), &mut out).unwrap();
    }
    assert_eq!(out.len(), 1, "one operation completed more than once");
    out[0]
}

fn ended(queue: &mut dyn KernelQueue) -> (u64, i64) {
    let Completion { token, result, .. } = next(queue);
    (token, result)
}

#[test]
fn bytes_move_and_counts_come_back() {
    for mut queue in queues() {
        let queue = &mut *queue;
        let file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let fd = file.as_raw_fd();
        let mut from = AlignedBuf::zeroed(BYTES);
        from.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i / 512 + i) as u8);
        push(queue, 7, fd, Work::Write, &pieces(&mut from), 4096);
        assert_eq!(ended(queue), (7, BYTES as i64));
        push(queue, 8, fd, Work::SyncData, &[], 0);
        assert_eq!(ended(queue), (8, 0));
        let mut to = AlignedBuf::zeroed(BYTES);
        push(queue, 9, fd, Work::Read, &pieces(&mut to), 4096);
        assert_eq!(ended(queue), (9, BYTES as i64));
        assert!(to[..] == from[..], "{queue:?}");
        push(queue, 10, fd, Work::Read, &pieces(&mut to), 4096 + BYTES as u64 / 4);
        assert_eq!(next(queue).result, BYTES as i64 * 3 / 4, "the file ends there");
        push(queue, 11, fd, Work::Read, &pieces(&mut to), 1 << 30);
        assert_eq!(next(queue).result, 0);
    }
}

#[test]
fn what_the_kernel_refuses_completes_with_the_error() {
    for mut queue in queues() {
        let queue = &mut *queue;
        let file = File::open("/dev/null").unwrap();
        let mut to = AlignedBuf::zeroed(BYTES);
        push(queue, 1, -1, Work::Read, &pieces(&mut to), 0);
        assert_eq!(ended(queue), (1, -i64::from(libc::EBADF)));
        push(queue, 2, file.as_raw_fd(), Work::Write, &pieces(&mut to), 0);
        assert_eq!(next(queue).token, 2, "opened for reading only");
    }
}

#[test]
fn a_wait_ends_in_time_or_when_it_is_woken() {
    for mut queue in queues() {
        let queue = &mut *queue;
        let (reader, mut writer) = std::io::pipe().unwrap();
        push(queue, 3, reader.as_raw_fd(), Work::Readable, &[], 0);
        let mut out = Vec::new();
        queue.wait(Some(Duration::from_millis(1)), &mut out).unwrap();
        assert!(out.is_empty());
        let woken = std::thread::spawn(move || {
            writer.write_all(b"x").unwrap();
            writer
        });
        assert_eq!(next(queue).token, 3);
        drop(woken.join().unwrap());
    }
}

#[test]
fn io_uring_gives_up_what_it_is_asked_to() {
    let Ok(mut queue) = UringQueue::new(8) else { return eprintln!("io_uring is not tested") };
    let (reader, _writer) = std::io::pipe().unwrap();
    let mut to = AlignedBuf::zeroed(BYTES);
    // A read of an empty pipe waits until it is cancelled.
    push(&mut queue, 5, reader.as_raw_fd(), Work::Read, &pieces(&mut to), 0);
    let mut out = Vec::new();
    queue.wait(Some(Duration::from_millis(1)), &mut out).unwrap();
    assert!(out.is_empty());
    queue.cancel(5);
    let ended = next(&mut queue);
    let given_up = [-i64::from(libc::ECANCELED), -i64::from(libc::EINTR)];
    assert!(ended.token == 5 && given_up.contains(&ended.result), "{ended:?}");
}
