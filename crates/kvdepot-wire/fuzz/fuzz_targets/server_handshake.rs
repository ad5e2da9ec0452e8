#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| kvdepot_wire::fuzz::fuzz_server_handshake(data));
