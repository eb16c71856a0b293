#![no_main]

use altiplano::Format;
use altiplano::import::torch_export::weights;
use altiplano_fuzz::{mutate_tokens, read_model};
use libfuzzer_sys::{fuzz_mutator, fuzz_target};
use std::io::{Cursor, Write};
use zip::write::{SimpleFileOptions, ZipWriter};

/// An archive of this program. Whatever else an archive holds is read by name, and has seeds of its own.
fn archive(program: &[u8]) -> Vec<u8> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    let stored = SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
    let entry = zip.start_file("m/models/model.json", stored).and_then(|()| Ok(zip.write_all(program)?));
    entry.expect("a zip file of one entry");
    zip.finish().expect("a zip file of one entry").into_inner()
}

fuzz_target!(|data: &[u8]| -> libfuzzer_sys::Corpus {
    // The graph is text in an archive, and what changes text must not have to keep the archive's sums right.
    if data.starts_with(b"{") {
        return read_model(&archive(data), Format::TorchExport);
    }
    let _ = weights(data);
    read_model(data, Format::TorchExport)
});

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| { mutate_tokens(data, size, max_size, seed) });
