//! Data and weight files (`.safetensors`, `.npy`), and synthetic batches where there is no file.

use crate::error::RuntimeError;
use crate::files;
use crate::host::{HostData, HostTensor};
use crate::random::Stream;
use altiplano_ir::dtype::DType;
use altiplano_ir::names::stack_of;
use altiplano_ir::op::Reducer;
use altiplano_ir::types::TensorType;
use half::{bf16, f16};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensorError, SafeTensors};
use std::borrow::{Borrow, Cow};
use std::collections::BTreeMap;
use std::path::Path;

/// Reads the tensors of a file by name. The one tensor of an `.npy` file is named after the file.
pub fn read(file: &Path) -> Result<BTreeMap<String, HostTensor>, RuntimeError> {
    match file.extension().and_then(|e| e.to_str()) {
        Some("safetensors") => read_safetensors(file),
        Some("npy") => {
            let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            Ok(BTreeMap::from([(name, read_npy(file)?)]))
        }
        _ => Err(RuntimeError::FileKind { file: file.to_path_buf() }),
    }
}

/// Finds a tensor by name among those of a file. If there is none, `NAME[3]` is row 3 of the tensor `NAME`.
pub fn tensor_named<'a>(tensors: &'a BTreeMap<String, HostTensor>, name: &str) -> Option<Cow<'a, HostTensor>> {
    if let Some(tensor) = tensors.get(name) {
        return Some(Cow::Borrowed(tensor));
    }
    let (stack, row) = stack_of(name)?;
    let stack = tensor_named(tensors, stack)?;
    let (&rows, shape) = stack.ty.shape.split_first()?;
    if row >= rows {
        return None;
    }
    let ty = stack.ty.with_shape(shape);
    let class = stack.data.class();
    let bytes = ty.elements() as usize * class.bytes();
    let data = stack.data.as_bytes().get(row as usize * bytes..(row as usize + 1) * bytes)?;
    Some(Cow::Owned(HostTensor { ty, data: HostData::from_bytes(class, data) }))
}

fn read_bytes(file: &Path) -> Result<Vec<u8>, RuntimeError> {
    files::read(file).map_err(|error| RuntimeError::Io { file: file.to_path_buf(), error })
}

/// Reads all tensors of a `.safetensors` file.
pub fn read_safetensors(file: &Path) -> Result<BTreeMap<String, HostTensor>, RuntimeError> {
    let bytes = read_bytes(file)?;
    let parsed = SafeTensors::deserialize(&bytes)
        .map_err(|error| RuntimeError::Safetensors { file: file.to_path_buf(), error })?;
    let mut tensors = BTreeMap::new();
    for (name, view) in parsed.tensors() {
        let fail = |problem| RuntimeError::Tensor { file: file.to_path_buf(), tensor: name.clone(), problem };
        let dtype = dtype_of(view.dtype()).ok_or(fail("has an element type that is not supported"))?;
        let ty = TensorType::new(dtype, view.shape().iter().map(|&d| d as u64).collect::<Vec<_>>());
        if !ty.check() || ty.bytes() != view.data().len() as u64 {
            return Err(fail("has a size in bytes that does not match its shape"));
        }
        let data = decode(dtype, view.data());
        tensors.insert(name, HostTensor { ty, data });
    }
    Ok(tensors)
}

/// Writes tensors to a `.safetensors` file. It writes a temporary file and renames it, so that the file is never half
/// written; links, devices and pipes stay what they are ([`files::Destination`]). Types that the format lacks are widened
/// to the smallest of its types that holds all of their numbers.
pub fn write_safetensors(file: &Path, tensors: &BTreeMap<String, HostTensor>) -> Result<(), RuntimeError> {
    let encoded = encoded(tensors)?;
    let io = |error| RuntimeError::Io { file: file.to_path_buf(), error };
    let format = |error| RuntimeError::Safetensors { file: file.to_path_buf(), error };
    let views = views(&encoded).map_err(format)?;
    match files::Destination::of(file) {
        files::Destination::Renamed(target) => {
            let beside = files::beside(&target).map_err(io)?;
            safetensors::serialize_to_file(views, None, beside.path()).map_err(format)?;
            files::publish(beside, &target).map_err(io)
        }
        files::Destination::Written(target) => {
            let bytes = safetensors::serialize(views, None).map_err(format)?;
            std::fs::write(target, bytes).map_err(io)
        }
    }
}

/// Encodes tensors as [`write_safetensors`] would write them to `file`.
pub fn encode_safetensors(
    file: &Path,
    tensors: impl IntoIterator<Item = (String, HostTensor)>,
) -> Result<Vec<u8>, RuntimeError> {
    let encoded = encoded(tensors)?;
    views(&encoded)
        .and_then(|views| safetensors::serialize(views, None))
        .map_err(|error| RuntimeError::Safetensors { file: file.to_path_buf(), error })
}

/// A tensor as the safetensors format stores it.
struct Encoded {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

fn encoded<N: Into<String>, T: Borrow<HostTensor>>(
    tensors: impl IntoIterator<Item = (N, T)>,
) -> Result<Vec<Encoded>, RuntimeError> {
    let one = |(name, tensor): (N, T)| {
        let tensor = tensor.borrow();
        tensor.check()?;
        let shape = tensor.ty.shape.iter().map(|&d| d as usize).collect();
        let (stored, dtype) = written_as(tensor.ty.dtype);
        let bytes = if stored == tensor.ty.dtype { encode(tensor) } else { encode(&tensor.cast(stored)) };
        Ok(Encoded { name: name.into(), dtype, shape, bytes })
    };
    tensors.into_iter().map(one).collect()
}

fn views(encoded: &[Encoded]) -> Result<Vec<(&str, TensorView<'_>)>, SafeTensorError> {
    encoded.iter().map(|e| Ok((e.name.as_str(), TensorView::new(e.dtype, e.shape.clone(), &e.bytes)?))).collect()
}

/// Reads the tensor of a NumPy file, versions 1 to 3 of the format.
fn read_npy(file: &Path) -> Result<HostTensor, RuntimeError> {
    parse_npy(&read_bytes(file)?).map_err(|problem| RuntimeError::Npy { file: file.to_path_buf(), problem })
}

/// The header of a NumPy file.
pub(crate) struct NpyHeader {
    pub ty: TensorType,
    pub big_endian: bool,
    /// Position of the first element, in bytes.
    pub data: u64,
}

/// Parses the header at the start of a NumPy file.
pub(crate) fn npy_header(bytes: &[u8]) -> Result<NpyHeader, &'static str> {
    const SHORT: &str = "ends before its header does";
    if bytes.get(..6) != Some(b"\x93NUMPY") {
        return Err("is not a NumPy file");
    }
    let (start, length) = match bytes.get(6).ok_or(SHORT)? {
        1 => (10, bytes.get(8..10).map(|b| u16::from_le_bytes([b[0], b[1]]) as usize)),
        2 | 3 => (12, bytes.get(8..12).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]) as usize)),
        _ => return Err("has a version of the format that is not supported"),
    };
    let end = start + length.ok_or(SHORT)?;
    let header =
        std::str::from_utf8(bytes.get(start..end).ok_or(SHORT)?).map_err(|_| "has a header that is not text")?;
    let field = |key: &str| {
        let at = header.find(key)? + key.len();
        Some(header[at..].trim_start_matches(['\'', '"']).trim_start().strip_prefix(':')?.trim_start())
    };
    let order = field("fortran_order").ok_or("does not say the order of its elements")?;
    if !order.starts_with("False") {
        return Err("is in Fortran order; save it with numpy.ascontiguousarray");
    }
    let descr = field("descr").ok_or("does not say its element type")?;
    let descr = descr.trim_start_matches(['\'', '"']).split(['\'', '"']).next().unwrap_or("");
    let (endian, kind) = descr.split_at_checked(1).ok_or("does not say its element type")?;
    let dtype = match kind {
        "f8" => DType::F64,
        "f4" => DType::F32,
        "f2" => DType::F16,
        "i8" => DType::I64,
        "i4" => DType::I32,
        "i2" => DType::I16,
        "i1" => DType::I8,
        "u8" => DType::U64,
        "u4" => DType::U32,
        "u2" => DType::U16,
        "u1" => DType::U8,
        "b1" => DType::Bool,
        _ => return Err("has an element type that is not supported"),
    };
    let shape = field("shape").ok_or("does not say its shape")?;
    let inside = shape.strip_prefix('(').and_then(|s| s.split_once(')')).ok_or("has no shape in its header")?.0;
    let dims: Result<Vec<u64>, _> =
        inside.split(',').map(str::trim).filter(|d| !d.is_empty()).map(str::parse).collect();
    let ty = TensorType::new(dtype, dims.map_err(|_| "has a shape that is not a list of sizes")?);
    Ok(NpyHeader { ty, big_endian: endian == ">", data: end as u64 })
}

fn parse_npy(bytes: &[u8]) -> Result<HostTensor, &'static str> {
    let NpyHeader { ty, big_endian, data } = npy_header(bytes)?;
    let data = bytes.get(data as usize..).unwrap_or(&[]);
    if !ty.check() || ty.bytes() != data.len() as u64 {
        return Err("has a size in bytes that does not match its shape");
    }
    if !big_endian {
        let data = decode(ty.dtype, data);
        return Ok(HostTensor { ty, data });
    }
    let width = ty.dtype.bytes() as usize;
    let swapped: Vec<u8> = data.chunks_exact(width).flat_map(|e| e.iter().rev().copied()).collect();
    let data = decode(ty.dtype, &swapped);
    Ok(HostTensor { ty, data })
}

/// Decodes little-endian elements of a file into their storage format.
pub fn decode(dtype: DType, bytes: &[u8]) -> HostData {
    fn each<const N: usize, T>(bytes: &[u8], convert: impl Fn([u8; N]) -> T) -> Vec<T> {
        bytes.as_chunks::<N>().0.iter().map(|&b| convert(b)).collect()
    }
    match dtype {
        DType::F64 => HostData::F32(each(bytes, |b| f64::from_le_bytes(b) as f32)),
        DType::F32 => HostData::F32(each(bytes, f32::from_le_bytes)),
        DType::F16 => HostData::F16(each(bytes, f16::from_le_bytes)),
        DType::BF16 => HostData::BF16(each(bytes, bf16::from_le_bytes)),
        DType::I64 | DType::U64 => HostData::I64(each(bytes, i64::from_le_bytes)),
        DType::U32 => HostData::I64(each(bytes, |b| u32::from_le_bytes(b) as i64)),
        DType::I32 => HostData::I32(each(bytes, i32::from_le_bytes)),
        DType::I16 => HostData::I32(each(bytes, |b| i16::from_le_bytes(b) as i32)),
        DType::U16 => HostData::I32(each(bytes, |b| u16::from_le_bytes(b) as i32)),
        DType::I8 => HostData::I32(each(bytes, |b| i8::from_le_bytes(b) as i32)),
        DType::U8 => HostData::I32(each(bytes, |b| u8::from_le_bytes(b) as i32)),
        DType::Bool => HostData::Bool(each(bytes, |b: [u8; 1]| (b[0] != 0) as u8)),
        // The remaining types have one byte, which holds the element's bits.
        _ if dtype.is_float() => HostData::BF16(each(bytes, |b: [u8; 1]| bf16::from_f64(dtype.from_bits(b[0].into())))),
        _ => HostData::I32(each(bytes, |b: [u8; 1]| dtype.from_bits(b[0].into()) as i32)),
    }
}

/// The inverse of [`decode`].
fn encode(tensor: &HostTensor) -> Vec<u8> {
    match (&tensor.data, tensor.ty.dtype) {
        (HostData::F32(v), DType::F64) => v.iter().flat_map(|&x| (x as f64).to_le_bytes()).collect(),
        (HostData::F32(v), _) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
        (HostData::F16(v), _) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
        (HostData::BF16(v), dtype) if dtype.bytes() == 1 => v.iter().map(|x| dtype.to_bits(x.to_f64()) as u8).collect(),
        (HostData::BF16(v), _) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
        (HostData::I64(v), DType::U32) => v.iter().flat_map(|&x| (x as u32).to_le_bytes()).collect(),
        (HostData::I64(v), _) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
        (HostData::I32(v), DType::I16 | DType::U16) => v.iter().flat_map(|&x| (x as u16).to_le_bytes()).collect(),
        (HostData::I32(v), dtype) if dtype.bytes() == 1 => v.iter().map(|&x| x as u8).collect(),
        (HostData::I32(v), _) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
        (HostData::Bool(v), _) => v.clone(),
    }
}

pub(crate) fn dtype_of(dtype: Dtype) -> Option<DType> {
    DType::ALL.into_iter().find(|d| safetensors_dtype(*d) == Some(dtype))
}

/// The safetensors name of a type, if the format has it.
fn safetensors_dtype(dtype: DType) -> Option<Dtype> {
    Some(match dtype {
        DType::F64 => Dtype::F64,
        DType::F32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::F8E4M3FN => Dtype::F8_E4M3,
        DType::F8E5M2 => Dtype::F8_E5M2,
        DType::F8E4M3FNUZ => Dtype::F8_E4M3FNUZ,
        DType::F8E5M2FNUZ => Dtype::F8_E5M2FNUZ,
        DType::F8E8M0FNU => Dtype::F8_E8M0,
        DType::I64 => Dtype::I64,
        DType::I32 => Dtype::I32,
        DType::I16 => Dtype::I16,
        DType::I8 => Dtype::I8,
        DType::U64 => Dtype::U64,
        DType::U32 => Dtype::U32,
        DType::U16 => Dtype::U16,
        DType::U8 => Dtype::U8,
        DType::Bool => Dtype::BOOL,
        DType::F8E4M3 | DType::F8E3M4 | DType::F8E4M3B11FNUZ => return None,
        DType::I4 | DType::I2 | DType::U4 | DType::U2 => return None,
    })
}

/// The type in which safetensors stores tensors of `dtype`: itself, or the smallest one that holds all of its numbers.
fn written_as(dtype: DType) -> (DType, Dtype) {
    match safetensors_dtype(dtype) {
        Some(known) => (dtype, known),
        None if dtype.is_float() => (DType::BF16, Dtype::BF16),
        None if dtype.is_signed_integer() => (DType::I8, Dtype::I8),
        None => (DType::U8, Dtype::U8),
    }
}

/// A synthetic batch: integers in `[0, bound)` (booleans below 2), or standard normals. The same seed and name give the
/// same values.
pub fn synthetic(name: &str, ty: &TensorType, bound: u64, seed: u64) -> HostTensor {
    let stream = Stream::new(seed, name);
    if ty.dtype.is_float() {
        let mut values = stream.normals(ty.elements() as usize, 1.0);
        if Reducer::Max.neutral(ty.dtype) >= 0.0 {
            // The type has no negative numbers.
            values.iter_mut().for_each(|x| *x = x.abs());
        }
        return HostTensor { ty: ty.with_dtype(DType::F32), data: HostData::F32(values) }.cast(ty.dtype);
    }
    let bound = if ty.dtype == DType::Bool { 2 } else { bound };
    let values: Vec<f64> = (0..ty.elements()).map(|i| stream.below(i, bound) as f64).collect();
    HostTensor::from_f64(ty.clone(), &values)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("altiplano-data-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        folder
    }

    fn npy(header: &str, data: &[u8]) -> Vec<u8> {
        let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
        bytes.extend((header.len() as u16).to_le_bytes());
        bytes.extend(header.as_bytes());
        bytes.extend(data);
        bytes
    }

    #[test]
    fn safetensors_round_trip_in_all_types() {
        let folder = folder("round");
        let file = folder.join("weights.safetensors");
        let tensors: BTreeMap<String, HostTensor> = DType::ALL
            .into_iter()
            .map(|dtype| (format!("t_{dtype}"), synthetic("t", &TensorType::new(dtype, [3, 5]), 100, 1)))
            .collect();
        write_safetensors(&file, &tensors).unwrap();
        let expected: BTreeMap<_, _> =
            tensors.into_iter().map(|(name, t)| (name, t.cast(written_as(t.ty.dtype).0))).collect();
        let found = read(&file).unwrap();
        assert_eq!(found, expected);
        for (name, dtype) in [("t_f8e4m3fn", DType::F8E4M3FN), ("t_f8e3m4", DType::BF16), ("t_u2", DType::U8)] {
            assert_eq!(found[name].ty.dtype, dtype, "{name}");
        }
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn rows_are_found_in_stacks() {
        let stack = HostTensor::f32([2, 1, 2], vec![1.0, 2.0, 3.0, 4.0]).unwrap();
        let own = HostTensor::f32([1], vec![5.0]).unwrap();
        let tensors = BTreeMap::from([("w".to_string(), stack.clone()), ("w[0][0]".to_string(), own.clone())]);
        let find = |name: &str| tensor_named(&tensors, name).map(|tensor| (tensor.ty.shape.clone(), tensor.to_f64()));
        assert_eq!(find("w"), Some((vec![2, 1, 2], vec![1.0, 2.0, 3.0, 4.0])));
        assert_eq!(find("w[1]"), Some((vec![1, 2], vec![3.0, 4.0])));
        assert_eq!(find("w[1][0]"), Some((vec![2], vec![3.0, 4.0])));
        assert_eq!(find("w[0][0]"), Some((vec![1], vec![5.0])));
        for name in ["w[2]", "v[0]", "w[1][1]", "w[-1]", "w[1", "w[]", "[0]", "w[1][0][0][0]"] {
            assert_eq!(find(name), None, "{name}");
        }
    }

    #[test]
    fn npy_files_are_read() {
        let header = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }   \n";
        let values = [1.5f32, -2.0, 0.0, 4.0, 5.0, 6.25];
        let data: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let folder = folder("npy");
        let file = folder.join("tokens.npy");
        std::fs::write(&file, npy(header, &data)).unwrap();
        assert_eq!(read(&file).unwrap()["tokens"], HostTensor::f32([2, 3], values.to_vec()).unwrap());
        std::fs::remove_dir_all(folder).unwrap();
        let big = "{'descr': '>i2', 'fortran_order': False, 'shape': (3,), }";
        let tensor = parse_npy(&npy(big, &[0, 1, 255, 255, 1, 0])).unwrap();
        assert_eq!((tensor.ty.to_string(), tensor.to_f64()), ("i16[3]".to_string(), vec![1.0, -1.0, 256.0]));
        let scalar = parse_npy(&npy("{'descr': '|b1', 'fortran_order': False, 'shape': (), }", &[1])).unwrap();
        assert_eq!((scalar.ty.rank(), scalar.to_f64()), (0, vec![1.0]));
    }

    #[test]
    fn bad_files_say_what_is_wrong() {
        let good = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }";
        let cases: Vec<(Vec<u8>, &str)> = vec![
            (b"hello".to_vec(), "not a NumPy file"),
            (b"\x93NUMPY".to_vec(), "ends before"),
            (b"\x93NUMPY\x01\x00\xff\xff{}".to_vec(), "ends before"),
            (b"\x93NUMPY\x09\x00\x02\x00{}".to_vec(), "version"),
            (npy(good, &[0; 7]), "does not match its shape"),
            (npy(good, &[0; 9]), "does not match its shape"),
            (npy(&good.replace("False", "True"), &[0; 8]), "Fortran"),
            (npy(&good.replace("<f4", "<c8"), &[0; 8]), "element type"),
            (npy(&good.replace("<f4", ""), &[0; 8]), "element type"),
            (npy(&good.replace("(2,)", "(x,)"), &[0; 8]), "list of sizes"),
            (npy(&good.replace("(2,)", "2"), &[0; 8]), "no shape"),
            (npy(&good.replace("(2,)", "(99999999999, 99999999999)"), &[0; 8]), "does not match"),
            (npy("{}", &[]), "order"),
        ];
        for (bytes, expected) in cases {
            let problem = parse_npy(&bytes).unwrap_err();
            assert!(problem.contains(expected), "{problem} does not mention {expected}");
        }
        let folder = folder("bad");
        let file = folder.join("broken.safetensors");
        std::fs::write(&file, b"nonsense").unwrap();
        let text = read(&file).unwrap_err().to_string();
        assert!(text.contains("broken.safetensors"), "{text}");
        let missing = read(&folder.join("none.npy")).unwrap_err().to_string();
        assert!(missing.contains("none.npy"), "{missing}");
        let other = read(&folder.join("a.csv")).unwrap_err().to_string();
        assert!(other.contains("a.csv") && other.contains(".safetensors"), "{other}");
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn synthetic_batches_are_in_range_and_repeatable() {
        let tokens = synthetic("tokens", &TensorType::new(DType::I32, [4, 100]), 50, 9);
        assert!(tokens.to_f64().iter().all(|x| (0.0..50.0).contains(x)));
        assert_eq!(tokens, synthetic("tokens", &TensorType::new(DType::I32, [4, 100]), 50, 9));
        assert_ne!(tokens, synthetic("targets", &TensorType::new(DType::I32, [4, 100]), 50, 9));
        let longer = synthetic("tokens", &TensorType::new(DType::I32, [8, 100]), 50, 9);
        assert_eq!(longer.to_f64()[..400], tokens.to_f64());
    }
}
