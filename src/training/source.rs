//! Data files: assigns a part of a file to each input, and reads the units of a batch from it.

use crate::error::{DataProblem, Error};
use crate::training::checkpoint::DataContent;
use crate::training::data::InputType;
use altiplano_ir::dtype::DType;
use altiplano_ir::types::TensorType;
use altiplano_runtime::array_file::ArrayFile;
use altiplano_runtime::element::Class;
use altiplano_runtime::{HostTensor, RuntimeError, files};
use std::collections::BTreeMap;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// The data of a run.
pub(super) struct Source {
    pub columns: BTreeMap<String, Column>,
    /// Number of units: the parts into which batches can be cut, usually samples.
    pub units: u64,
    /// The first unit of each file, and the end.
    pub starts: Vec<u64>,
    /// Assumptions about the files, in words for the user.
    pub assumed: String,
}

/// The source of an input.
pub(super) enum Column {
    /// Slices along dimension `dim` of arrays, which are concatenated.
    Rows { parts: Vec<ArrayFile>, dim: usize },
    /// Segments of a sequence of ids: unit `i` is `length` of them from `i * stride + shift`.
    Stretches { ids: ArrayFile, length: u64, stride: u64, shift: u64 },
    /// The same tensor for all batches.
    Same(HostTensor),
}

/// Opens a data file.
///
/// * `.safetensors` with tensors named after the inputs (`tokens` or `input/tokens`), or a folder of such files, whose
///   samples are concatenated in the order of file names.
/// * `.npy` of the only input, or of ids.
/// * `.u16` and `.u32`, or any file with a `token_type`: bare little-endian ids.
///
/// Ids are cut into sequences for a model whose input is `[batch, sequence]`. With two such inputs, the one named label
/// or target takes the ids shifted by one.
pub(super) fn open(
    inputs: &[InputType],
    state: &BTreeMap<String, HostTensor>,
    file: &Path,
    token_type: Option<DType>,
    units: u64,
) -> Result<Source, Error> {
    let extension = file.extension().and_then(|e| e.to_str()).unwrap_or("").to_lowercase();
    let raw = |dtype| -> Result<Source, Error> { of_ids(inputs, ArrayFile::raw(file, dtype)?, file) };
    match (token_type, extension.as_str()) {
        _ if file.is_dir() => named(inputs, state, &shards(file)?, units),
        (Some(dtype), _) => raw(dtype),
        (None, "u16") => raw(DType::U16),
        (None, "u32") => raw(DType::U32),
        (None, "bin") => Err(problem(file, DataProblem::TokenType)),
        (None, "npy") => {
            let array = ArrayFile::npy(file)?;
            match inputs {
                [only] if only.ty.rank() == array.ty.rank() => {
                    let arrays = BTreeMap::from([(only.name.clone(), array)]);
                    named(inputs, state, &[(file.to_path_buf(), arrays)], units)
                }
                _ => of_ids(inputs, array, file),
            }
        }
        _ => named(inputs, state, &[(file.to_path_buf(), ArrayFile::safetensors(file)?)], units),
    }
}

type Arrays = BTreeMap<String, ArrayFile>;

/// Bytes at either end of a file that enter its fingerprint.
const ENDS: u64 = 64 << 10;

/// Bytes of each sample in between, and the number of samples over all files. They detect any difference that spans a
/// thousandth of the data, and read at most four megabytes.
const SAMPLE: u64 = 4 << 10;
const SAMPLES: u64 = 1 << 10;

/// The fingerprint of data; reading all of it would take too long.
pub(super) fn content(place: &Path) -> Result<DataContent, Error> {
    let files = if place.is_dir() { files_of(place)? } else { vec![place.to_path_buf()] };
    let (mut bytes, mut ends, mut between) = (0, crc32fast::Hasher::new(), crc32fast::Hasher::new());
    let samples = (SAMPLES / files.len() as u64).max(1);
    for name in files {
        let mut add = || -> std::io::Result<()> {
            let mut file = files::open(&name)?;
            let length = file.metadata()?.len();
            let mut part = Vec::new();
            let mut read = |from: u64, count: u64, crc: &mut crc32fast::Hasher| -> std::io::Result<()> {
                part.clear();
                file.seek(SeekFrom::Start(from))?;
                Read::by_ref(&mut file).take(count).read_to_end(&mut part)?;
                crc.update(&part);
                Ok(())
            };
            bytes += length;
            ends.update(&length.to_le_bytes());
            let last = length.saturating_sub(ENDS).max(ENDS.min(length));
            read(0, ENDS, &mut ends)?;
            read(last, ENDS, &mut ends)?;
            let middle = last.saturating_sub(ENDS);
            let samples = samples.min(middle.div_ceil(SAMPLE));
            // The product of a file's length and a thousand may overflow 64 bits.
            let place = |i: u64| ENDS + (u128::from(middle) * u128::from(i) / u128::from(samples)) as u64;
            (0..samples).try_for_each(|i| read(place(i), SAMPLE.min(last - place(i)), &mut between))
        };
        add().map_err(|error| Error::Read { file: name.clone(), error })?;
    }
    let hex = |crc: crc32fast::Hasher| format!("{:08x}", crc.finalize());
    Ok(DataContent { bytes, crc32: hex(ends), sampled_crc32: Some(hex(between)) })
}

/// Opens the files of a folder.
fn shards(folder: &Path) -> Result<Vec<(PathBuf, Arrays)>, Error> {
    let open = |file: PathBuf| Ok((file.clone(), ArrayFile::safetensors(&file)?));
    files_of(folder)?.into_iter().map(open).collect()
}

fn files_of(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let io = |error| Error::Read { file: folder.to_path_buf(), error };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(io)? {
        let file = entry.map_err(io)?.path();
        if file.extension().is_some_and(|e| e.eq_ignore_ascii_case("safetensors")) {
            files.push(file);
        }
    }
    files.sort();
    if files.is_empty() {
        return Err(problem(folder, DataProblem::EmptyFolder));
    }
    Ok(files)
}

/// Finds tensors by the names of inputs. A file has as many units as each of its inputs has.
fn named(
    inputs: &[InputType],
    state: &BTreeMap<String, HostTensor>,
    files: &[(PathBuf, Arrays)],
    batch_units: u64,
) -> Result<Source, Error> {
    let mut columns = BTreeMap::new();
    let mut units: Vec<Option<u64>> = vec![None; files.len()];
    for input in inputs {
        let name = &input.name;
        let Some(dim) = input.batch_dim else {
            let (file, arrays) = &files[0];
            let tensor = match (found(arrays, name), state.get(name)) {
                (Some(array), _) => {
                    expect_type(file, input, array, &input.ty)?;
                    HostTensor::new(array.ty.clone(), array.read(0, array.ty.elements())?)?
                }
                (None, Some(given)) => given.clone(),
                (None, None) => return Err(problem(file, DataProblem::Missing { name: name.clone() })),
            };
            columns.insert(name.clone(), Column::Same(tensor.cast(input.ty.dtype)));
            continue;
        };
        let mut parts = Vec::new();
        for ((file, arrays), units) in files.iter().zip(&mut units) {
            let missing = || problem(file, DataProblem::Missing { name: name.clone() });
            let array = found(arrays, name).ok_or_else(missing)?;
            let rows = array.ty.shape.get(dim).copied().unwrap_or(0);
            let mut wanted = input.ty.clone();
            wanted.shape[dim] = rows;
            expect_type(file, input, array, &wanted)?;
            let own = rows / rows_each(input, dim, batch_units);
            *units = Some(units.map_or(own, |units| units.min(own)));
            parts.push(array.clone());
        }
        columns.insert(name.clone(), Column::Rows { parts, dim });
    }
    let mut starts = vec![0];
    for units in units {
        starts.push(starts[starts.len() - 1] + units.unwrap_or(batch_units));
    }
    Ok(Source { columns, units: starts[starts.len() - 1], starts, assumed: String::new() })
}

/// Cuts one sequence of ids for a model with one input, or with tokens and labels.
fn of_ids(inputs: &[InputType], ids: ArrayFile, file: &Path) -> Result<Source, Error> {
    let fits = |i: &InputType| i.ty.rank() == 2 && i.ty.dtype.is_integer() && i.batch_dim == Some(0);
    let is_label = |i: &InputType| i.name.contains("label") || i.name.contains("target");
    let shifts = match inputs {
        [only] if fits(only) => vec![(only, 0)],
        [a, b] if fits(a) && a.ty.shape == b.ty.shape && b.ty.dtype.is_integer() => match (is_label(a), is_label(b)) {
            (false, true) => vec![(a, 0), (b, 1)],
            (true, false) => vec![(b, 0), (a, 1)],
            _ => return Err(problem(file, DataProblem::WhichIsLabel { inputs: [a.name.clone(), b.name.clone()] })),
        },
        _ => return Err(problem(file, DataProblem::OneTensor { inputs: inputs.len() })),
    };
    if !ids.ty.dtype.is_integer() {
        let (name, expected) = (shifts[0].0.name.clone(), shifts[0].0.ty.clone());
        return Err(problem(file, DataProblem::Type { name, found: ids.ty, expected }));
    }
    let length = shifts[0].0.ty.shape[1].max(1);
    let last = shifts[shifts.len() - 1].1;
    // Either rows one longer than a sequence, or one long sequence in which every segment also takes the next id.
    let in_rows = ids.ty.rank() == 2 && ids.ty.shape[1] == length + 1 && last == 1;
    let stride = if in_rows { length + 1 } else { length };
    let units = ids.ty.elements().saturating_sub(if in_rows { 0 } else { last }) / stride;
    let mut assumed = format!("; '{}' takes {length} ids each", shifts[0].0.name);
    if let Some((labels, _)) = shifts.get(1) {
        assumed += &format!(", '{}' those one later", labels.name);
    }
    let column = |&(input, shift): &(&InputType, u64)| {
        (input.name.clone(), Column::Stretches { ids: ids.clone(), length, stride, shift })
    };
    let columns = shifts.iter().map(column).collect();
    Ok(Source { columns, units, starts: vec![0, units], assumed })
}

/// The rows of files that make a batch.
pub(super) struct BatchRows<'a> {
    /// Number of units in the batch.
    pub units: u64,
    /// The units as runs in the files: start and count.
    pub runs: &'a [(u64, u64)],
    /// The first unit of each file, and the end.
    pub starts: &'a [u64],
    /// The rows of the batch to read; all if absent.
    pub wanted: Option<&'a [bool]>,
}

/// Rows that are contiguous in the batch and in the files.
struct Run {
    /// First row in the batch.
    to: u64,
    /// First row over all files.
    from: u64,
    count: u64,
}

impl BatchRows<'_> {
    /// The rows to read, with `rows_each` rows per unit, as runs.
    fn read(&self, rows_each: u64) -> Vec<Run> {
        let is_wanted = |row: u64| self.wanted.is_none_or(|wanted| wanted.get(row as usize).copied().unwrap_or(false));
        let mut found: Vec<Run> = Vec::new();
        let mut to = 0;
        for &(first, count) in self.runs {
            for from in first * rows_each..(first + count) * rows_each {
                if is_wanted(to) {
                    match found.last_mut() {
                        Some(run) if run.to + run.count == to && run.from + run.count == from => run.count += 1,
                        _ => found.push(Run { to, from, count: 1 }),
                    }
                }
                to += 1;
            }
        }
        found
    }
}

impl Column {
    /// Reads the input of a batch, with zeros in rows that are not wanted. Also returns the number of bytes read.
    pub(crate) fn gather(&self, input: &InputType, batch: &BatchRows<'_>) -> Result<(HostTensor, u64), RuntimeError> {
        let mut whole = HostTensor::zeros(input.ty.clone());
        let width = size_of_element(&whole);
        let mut bytes_read = 0;
        // Copies elements of a file, converted to the input's type, to position `to`.
        let mut put = |array: &ArrayFile, first: u64, count: u64, by_way_of: DType, to: u64| {
            let ty = TensorType::new(array.ty.dtype, [count]);
            bytes_read += ty.bytes();
            let part = HostTensor { ty, data: array.read(first, count)? }.cast(by_way_of).cast(input.ty.dtype);
            let target = (to * width) as usize;
            whole.data.as_bytes_mut()[target..target + (count * width) as usize].copy_from_slice(part.data.as_bytes());
            Ok::<(), RuntimeError>(())
        };
        match self {
            Column::Same(tensor) => return Ok((tensor.clone(), 0)),
            Column::Stretches { ids, length, stride, shift } => {
                for Run { to, from, count } in batch.read(1) {
                    for i in 0..count {
                        put(ids, (from + i) * stride + shift, *length, ids.ty.dtype, (to + i) * length)?;
                    }
                }
            }
            Column::Rows { parts, dim } => {
                let rows_each = rows_each(input, *dim, batch.units);
                let inner: u64 = input.ty.shape[dim + 1..].iter().product();
                let outer: u64 = input.ty.shape[..*dim].iter().product();
                let runs = batch.read(rows_each);
                let dtype = parts[0].ty.dtype;
                for block in 0..outer {
                    for Run { to, from, count } in &runs {
                        let (mut at, end) = (*from, from + count);
                        while at < end {
                            // The last file that starts at or before the row's unit; empty files are skipped.
                            let part = batch.starts.partition_point(|&start| start <= at / rows_each) - 1;
                            let until = end.min(batch.starts[part + 1] * rows_each);
                            let array = &parts[part];
                            let row = block * array.ty.shape[*dim] + at - batch.starts[part] * rows_each;
                            let target = block * input.ty.shape[*dim] + to + at - from;
                            put(array, row * inner, (until - at) * inner, dtype, target * inner)?;
                            at = until;
                        }
                    }
                }
            }
        }
        Ok((whole, bytes_read))
    }
}

/// Bytes of an element in a host tensor's storage.
fn size_of_element(tensor: &HostTensor) -> u64 {
    Class::of(tensor.ty.dtype).bytes() as u64
}

/// Number of rows along the batch dimension per unit.
fn rows_each(input: &InputType, dim: usize, batch_units: u64) -> u64 {
    (input.ty.shape[dim] / batch_units).max(1)
}

fn found<'a>(arrays: &'a Arrays, name: &str) -> Option<&'a ArrayFile> {
    arrays.get(name).or_else(|| arrays.get(&format!("input/{name}")))
}

fn expect_type(file: &Path, input: &InputType, array: &ArrayFile, wanted: &TensorType) -> Result<(), Error> {
    if array.ty.shape == wanted.shape && array.ty.dtype.is_float() == wanted.dtype.is_float() {
        return Ok(());
    }
    let (name, found, expected) = (input.name.clone(), array.ty.clone(), input.ty.clone());
    Err(problem(file, DataProblem::Type { name, found, expected }))
}

fn problem(file: &Path, problem: DataProblem) -> Error {
    Error::Data { file: file.to_path_buf(), problem: Box::new(problem) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::training::bounds::Floats;
    use altiplano_runtime::data::{synthetic, write_safetensors};

    fn input(name: &str, shape: &[u64], batch_dim: usize) -> InputType {
        let ty = TensorType::new(DType::I32, shape);
        InputType { name: name.to_string(), ty, batch_dim: Some(batch_dim), bound: None, floats: Floats::Any }
    }

    /// Samples along any dimension, in files of any sizes, are those of one concatenated tensor.
    #[test]
    fn samples_of_a_folder_follow_each_other() {
        let folder = std::env::temp_dir().join(format!("altiplano-source-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        for dim in 0..3 {
            let mut shape = [2, 3, 4];
            let mut whole: Vec<Vec<f64>> = Vec::new();
            for (file, rows) in [("a", 5), ("b", 1), ("c", 0), ("d", 7)] {
                shape[dim] = rows;
                let dtype = if file == "b" { DType::I64 } else { DType::I32 };
                let tensor = synthetic(file, &TensorType::new(dtype, shape), 1000, dim as u64);
                let numbers = tensor.to_f64();
                let inner: u64 = shape[dim + 1..].iter().product();
                let outer: u64 = shape[..dim].iter().product();
                for row in 0..rows {
                    let of_block = |o: u64| {
                        let first = ((o * rows + row) * inner) as usize;
                        numbers[first..first + inner as usize].to_vec()
                    };
                    whole.push((0..outer).flat_map(of_block).collect());
                }
                let tensors = BTreeMap::from([("x".to_string(), tensor)]);
                write_safetensors(&folder.join(format!("{file}.safetensors")), &tensors).unwrap();
            }
            shape[dim] = 4;
            let x = input("x", &shape, dim);
            let source = open(std::slice::from_ref(&x), &BTreeMap::new(), &folder, None, 4).unwrap();
            assert_eq!((source.units, source.starts.as_slice()), (13, &[0, 5, 6, 6, 13][..]));
            for runs in [&[(4, 4)][..], &[(12, 1), (0, 2), (5, 1)], &[(9, 1), (4, 3)]] {
                let rows = |wanted| BatchRows { units: 4, runs, starts: &source.starts, wanted };
                let (batch, _) = source.columns["x"].gather(&x, &rows(None)).unwrap();
                batch.check().unwrap();
                let units: Vec<u64> = runs.iter().flat_map(|&(first, count)| first..first + count).collect();
                let inner: usize = shape[dim + 1..].iter().product::<u64>() as usize;
                let outer: usize = shape[..dim].iter().product::<u64>() as usize;
                // Unwanted rows are neither read nor filled.
                for wanted in [&[true, false, false, true], &[false, true, true, false], &[false; 4]] {
                    let (part, read) = source.columns["x"].gather(&x, &rows(Some(wanted))).unwrap();
                    let kept = |(i, x): (usize, f64)| if wanted[i / inner % 4] { x } else { 0.0 };
                    let expected: Vec<f64> = batch.to_f64().into_iter().enumerate().map(kept).collect();
                    assert_eq!(part.to_f64(), expected, "dimension {dim}, {runs:?}, {wanted:?}");
                    // The second file has a wider type.
                    let width = |unit: &u64| if *unit == 5 { 8 } else { 4 };
                    let each = (inner * outer) as u64;
                    let of_rows = units.iter().zip(wanted).filter(|(_, wanted)| **wanted);
                    assert_eq!(read, of_rows.map(|(unit, _)| each * width(unit)).sum::<u64>());
                }
                let row = |o: usize, u: &u64| whole[*u as usize][o * inner..(o + 1) * inner].to_vec();
                let expected: Vec<f64> =
                    (0..outer).flat_map(|o| units.iter().flat_map(move |u| row(o, u)).collect::<Vec<_>>()).collect();
                assert_eq!(batch.to_f64(), expected, "dimension {dim}, {runs:?}");
            }
        }
        std::fs::remove_dir_all(folder).unwrap();
    }

    /// A difference over a thousandth of the data is detected anywhere, and any difference in a small file.
    #[test]
    fn data_that_differs_in_between_is_other_data() {
        let file = std::env::temp_dir().join(format!("altiplano-content-{}.u16", std::process::id()));
        let large = (3 * SAMPLES * SAMPLE) as usize;
        let small = (2 * ENDS + 3 * SAMPLE) as usize;
        for (length, run) in [(large, 3 * SAMPLE as usize), (small, 1), (2 * ENDS as usize, 1), (100, 1)] {
            let mut bytes: Vec<u8> = (0..length).map(|i| (i % 251) as u8).collect();
            std::fs::write(&file, &bytes).unwrap();
            let before = content(&file).unwrap();
            assert!(content(&file).unwrap().is_same(&before));
            for at in [length / 3, length / 2, length - length / 7] {
                let at = at.min(length - run);
                bytes[at..at + run].iter_mut().for_each(|byte| *byte ^= 1);
                std::fs::write(&file, &bytes).unwrap();
                let after = content(&file).unwrap();
                assert!(!after.is_same(&before), "{length} bytes, {run} from {at}");
                // The fingerprint of an older checkpoint covers only the ends.
                let older = DataContent { sampled_crc32: None, ..before.clone() };
                assert_eq!(after.is_same(&older), after.crc32 == before.crc32);
                bytes[at..at + run].iter_mut().for_each(|byte| *byte ^= 1);
            }
        }
        std::fs::remove_file(file).unwrap();
    }

    #[test]
    fn ids_are_cut_into_tokens_and_labels() {
        let file = std::env::temp_dir().join(format!("altiplano-ids-{}.u16", std::process::id()));
        let ids: Vec<u8> = (0..14u16).flat_map(|id| (1000 + id).to_le_bytes()).collect();
        std::fs::write(&file, &ids).unwrap();
        let both = [input("labels", &[2, 4], 0), input("tokens", &[2, 4], 0)];
        let source = open(&both, &BTreeMap::new(), &file, None, 2).unwrap();
        assert_eq!(source.units, 3);
        assert!(source.assumed.contains("'tokens' takes 4 ids each, 'labels' those one later"), "{}", source.assumed);
        let batch = BatchRows { units: 2, runs: &[(2, 1), (0, 1)], starts: &source.starts, wanted: None };
        let of = |i: usize| source.columns[&both[i].name].gather(&both[i], &batch).unwrap().0;
        assert_eq!(of(1).to_f64(), [1008.0, 1009.0, 1010.0, 1011.0, 1000.0, 1001.0, 1002.0, 1003.0]);
        assert_eq!(of(0).to_f64(), [1009.0, 1010.0, 1011.0, 1012.0, 1001.0, 1002.0, 1003.0, 1004.0]);
        // The last id has no label; without labels none is needed.
        std::fs::write(&file, &ids[..24]).unwrap();
        assert_eq!(open(&both, &BTreeMap::new(), &file, None, 2).unwrap().units, 2);
        assert_eq!(open(&both[1..], &BTreeMap::new(), &file, None, 2).unwrap().units, 3);
        let refused = |inputs: &[InputType], token_type, expected: &str| {
            let error = open(inputs, &BTreeMap::new(), &file, token_type, 2).err().unwrap().to_string();
            assert!(error.contains(expected), "{error}");
        };
        refused(&[input("x", &[2, 4], 0), input("y", &[2, 4], 0)], None, "'x' and 'y'");
        refused(&[input("x", &[2, 4], 0), input("y", &[2, 3], 0)], None, "2 inputs");
        refused(&[input("x", &[4, 2], 1)], None, "1 input");
        std::fs::write(&file, &ids[..23]).unwrap();
        refused(&both, None, "multiple of its element");
        std::fs::remove_file(file).unwrap();
    }
}
