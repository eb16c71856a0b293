//! Tensors in files of any size, read in parts without loading the whole file: `.npy`, `.safetensors`, and raw
//! little-endian numbers.

use crate::data::{NpyHeader, decode, dtype_of, npy_header};
use crate::error::RuntimeError;
use crate::host::HostData;
use altiplano_ir::dtype::DType;
use altiplano_ir::types::TensorType;
use safetensors::SafeTensorError;
use safetensors::tensor::Metadata;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// A tensor whose elements stay in its file.
#[derive(Clone, Debug)]
pub struct ArrayFile {
    pub file: PathBuf,
    pub ty: TensorType,
    /// Shared by all tensors of the file.
    open: Arc<Mutex<File>>,
    /// Position of the first element, in bytes.
    offset: u64,
    big_endian: bool,
}

/// Upper limit on the length of a header; longer ones are taken to be corrupt.
const MAX_HEADER_BYTES: u64 = 100 << 20;

impl ArrayFile {
    /// Opens the tensor of a NumPy file.
    pub fn npy(file: &Path) -> Result<ArrayFile, RuntimeError> {
        let (mut open, length) = opened(file)?;
        let mut start = Vec::new();
        (&mut open).take(1 << 17).read_to_end(&mut start).map_err(|error| io(file, error))?;
        let npy = |problem| RuntimeError::Npy { file: file.to_path_buf(), problem };
        let NpyHeader { ty, big_endian, data } = npy_header(&start).map_err(npy)?;
        if !ty.check() || ty.bytes() != length.saturating_sub(data) {
            return Err(npy("has a size in bytes that does not match its shape"));
        }
        let open = Arc::new(Mutex::new(open));
        Ok(ArrayFile { file: file.to_path_buf(), ty, open, offset: data, big_endian })
    }

    /// Opens the tensors of a `.safetensors` file.
    pub fn safetensors(file: &Path) -> Result<BTreeMap<String, ArrayFile>, RuntimeError> {
        let (mut open, length) = opened(file)?;
        let fail = |error| RuntimeError::Safetensors { file: file.to_path_buf(), error };
        let mut size = [0; 8];
        open.read_exact(&mut size).map_err(|_| fail(SafeTensorError::HeaderTooSmall))?;
        let size = u64::from_le_bytes(size);
        if size > MAX_HEADER_BYTES {
            return Err(fail(SafeTensorError::HeaderTooLarge));
        }
        let start = size + 8;
        if start > length {
            return Err(fail(SafeTensorError::InvalidHeaderLength));
        }
        let mut header = vec![0; size as usize];
        open.read_exact(&mut header).map_err(|error| io(file, error))?;
        let metadata: Metadata = serde_json::from_slice(&header)
            .map_err(|error| fail(SafeTensorError::InvalidHeaderDeserialization(error)))?;
        // The tensors must cover the whole file, as they must where it is read at once.
        if start.checked_add(metadata.data_len() as u64) != Some(length) {
            return Err(fail(SafeTensorError::MetadataIncompleteBuffer));
        }
        let open = Arc::new(Mutex::new(open));
        let mut arrays = BTreeMap::new();
        for (name, info) in metadata.tensors() {
            let fail = |problem| RuntimeError::Tensor { file: file.to_path_buf(), tensor: name.clone(), problem };
            let dtype = dtype_of(info.dtype).ok_or_else(|| fail("has an element type that is not supported"))?;
            let ty = TensorType::new(dtype, info.shape.iter().map(|&d| d as u64).collect::<Vec<_>>());
            let (from, to) = (info.data_offsets.0 as u64, info.data_offsets.1 as u64);
            if !ty.check() || to.checked_sub(from) != Some(ty.bytes()) {
                return Err(fail("has a size in bytes that does not match its shape"));
            }
            let array =
                ArrayFile { file: file.to_path_buf(), ty, open: open.clone(), offset: start + from, big_endian: false };
            arrays.insert(name, array);
        }
        Ok(arrays)
    }

    /// Opens a file that holds nothing but little-endian numbers, as a tensor of one dimension.
    pub fn raw(file: &Path, dtype: DType) -> Result<ArrayFile, RuntimeError> {
        let (open, length) = opened(file)?;
        if length % dtype.bytes() != 0 {
            let problem = "has a length that is no multiple of its element size";
            return Err(RuntimeError::Tensor { file: file.to_path_buf(), tensor: dtype.to_string(), problem });
        }
        let ty = TensorType::new(dtype, [length / dtype.bytes()]);
        let open = Arc::new(Mutex::new(open));
        Ok(ArrayFile { file: file.to_path_buf(), ty, open, offset: 0, big_endian: false })
    }

    /// Reads elements `first..first + count` in row-major order, in the storage format of their type.
    pub fn read(&self, first: u64, count: u64) -> Result<HostData, RuntimeError> {
        let width = self.ty.dtype.bytes();
        let mut bytes = vec![0; (count * width) as usize];
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.seek(SeekFrom::Start(self.offset + first * width))
            .and_then(|_| open.read_exact(&mut bytes))
            .map_err(|error| io(&self.file, error))?;
        if self.big_endian {
            bytes.chunks_exact_mut(width as usize).for_each(<[u8]>::reverse);
        }
        Ok(decode(self.ty.dtype, &bytes))
    }
}

fn io(file: &Path, error: std::io::Error) -> RuntimeError {
    RuntimeError::Io { file: file.to_path_buf(), error }
}

fn opened(file: &Path) -> Result<(File, u64), RuntimeError> {
    let open = crate::files::open(file).map_err(|error| io(file, error))?;
    let found = open.metadata().map_err(|error| io(file, error))?;
    Ok((open, found.len()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{read_safetensors, synthetic, write_safetensors};
    use crate::host::HostTensor;

    #[test]
    fn parts_are_what_whole_files_have_there() {
        let folder = std::env::temp_dir().join(format!("altiplano-array-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let file = folder.join("a.safetensors");
        let tensors: BTreeMap<String, HostTensor> = [DType::F32, DType::BF16, DType::I32, DType::I64, DType::U8]
            .into_iter()
            .map(|dtype| (format!("t {dtype}"), synthetic("t", &TensorType::new(dtype, [4, 6]), 100, 1)))
            .collect();
        write_safetensors(&file, &tensors).unwrap();
        let whole = read_safetensors(&file).unwrap();
        let arrays = ArrayFile::safetensors(&file).unwrap();
        assert_eq!(arrays.keys().collect::<Vec<_>>(), whole.keys().collect::<Vec<_>>());
        for (name, array) in &arrays {
            assert_eq!(array.ty, whole[name].ty);
            let part = HostTensor::new(array.ty.with_shape([7]), array.read(5, 7).unwrap()).unwrap();
            assert_eq!(part.to_f64(), whole[name].to_f64()[5..12], "{name}");
        }
        // Truncated after its header, and within it; longer than its tensors.
        let bytes = std::fs::read(&file).unwrap();
        std::fs::write(&file, [&bytes[..], &[0]].concat()).unwrap();
        assert!(ArrayFile::safetensors(&file).is_err() && read_safetensors(&file).is_err());
        for length in [bytes.len() - 1, 40, 8, 3] {
            std::fs::write(&file, &bytes[..length]).unwrap();
            assert!(ArrayFile::safetensors(&file).is_err(), "{length}");
        }
        let npy = folder.join("a.npy");
        let header = "{'descr': '>i2', 'fortran_order': False, 'shape': (2, 2), }\n";
        let start = [&b"\x93NUMPY\x01\x00"[..], &(header.len() as u16).to_le_bytes(), header.as_bytes()].concat();
        std::fs::write(&npy, [&start[..], &[0, 1, 0, 2, 255, 255, 1, 0]].concat()).unwrap();
        let array = ArrayFile::npy(&npy).unwrap();
        assert_eq!(array.ty.to_string(), "i16[2,2]");
        assert_eq!(array.read(1, 3).unwrap(), HostData::I32(vec![2, -1, 256]));
        let raw = folder.join("a.u16");
        std::fs::write(&raw, [1, 0, 255, 255, 0, 1]).unwrap();
        let array = ArrayFile::raw(&raw, DType::U16).unwrap();
        assert_eq!((array.ty.shape.as_slice(), array.read(1, 2).unwrap()), (&[3][..], HostData::I32(vec![65535, 256])));
        assert!(array.read(2, 2).is_err());
        assert!(ArrayFile::raw(&raw, DType::U32).is_err());
        std::fs::remove_dir_all(folder).unwrap();
    }
}
