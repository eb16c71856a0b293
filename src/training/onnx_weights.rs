//! The tensors of an ONNX model, whose data may be in other files of its folder.

use crate::error::Error;
use crate::model::read_bytes;
use altiplano_import::onnx::{self, External, Held, HeldData, OnnxError, TensorError};
use altiplano_runtime::{HostTensor, files};
use std::collections::BTreeMap;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// Reads the model's tensors by name. Tensors whose data was stripped from the file are left out.
pub fn read(file: &Path) -> Result<BTreeMap<String, HostTensor>, Error> {
    let fail = |error| Error::Onnx { file: file.to_path_buf(), error: Box::new(error) };
    let mut tensors = BTreeMap::new();
    let held = onnx::held(&read_bytes(file)?, &|place, most| beside(file, place, most)).map_err(fail)?;
    for Held { name, ty, data } in held {
        let elements = match data {
            HeldData::Missing => continue,
            HeldData::Inline(elements) => elements,
            HeldData::External(place) => {
                let tensor = |error| fail(OnnxError::Initializer { name: name.clone(), error });
                let path = inside(file, &place).map_err(|error| match error {
                    Outside::Named => tensor(TensorError::Location(place.location.clone())),
                    Outside::Unreadable { file, error } => Error::Read { file, error },
                })?;
                let bytes = part(&path, &place, ty.bytes()).map_err(|error| Error::Read { file: path, error })?;
                onnx::decode(&ty, &bytes).map_err(tensor)?
            }
        };
        tensors.insert(name, HostTensor::from_f64(ty, &elements));
    }
    Ok(tensors)
}

/// Reads data of a model from another file of its folder, up to `most + 1` bytes; `None` if it cannot be read.
pub fn beside(model: &Path, place: &External, most: u64) -> Option<Vec<u8>> {
    let path = inside(model, place).ok()?;
    // Reading a pipe would block.
    path.is_file().then(|| part(&path, place, most).ok()).flatten()
}

enum Outside {
    Named,
    Unreadable { file: PathBuf, error: std::io::Error },
}

/// The file with a tensor's data. With links resolved, it must lie in the model's folder.
fn inside(model: &Path, place: &External) -> Result<PathBuf, Outside> {
    let folder = model.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let real = |path: PathBuf| path.canonicalize().map_err(|error| Outside::Unreadable { file: path, error });
    let path = real(folder.join(&place.location))?;
    if path.starts_with(real(folder.to_path_buf())?) { Ok(path) } else { Err(Outside::Named) }
}

/// Reads up to `most + 1` bytes; the extra byte shows that there are too many.
fn part(path: &Path, place: &External, most: u64) -> std::io::Result<Vec<u8>> {
    let mut file = files::open(path)?;
    file.seek(SeekFrom::Start(place.offset))?;
    let length = place.length.unwrap_or(u64::MAX).min(most.saturating_add(1));
    let mut bytes = Vec::new();
    file.take(length).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use altiplano_import::onnx::proto;
    use prost::Message;

    fn property(key: &str, value: &str) -> proto::Property {
        proto::Property { key: key.into(), value: value.into() }
    }

    /// A model with one tensor of two floats at `location`.
    fn model(location: &str, offset: &str) -> Vec<u8> {
        let tensor = proto::Tensor {
            name: "w".into(),
            dims: vec![2],
            data_type: 1,
            data_location: 1,
            external_data: vec![property("location", location), property("offset", offset), property("length", "8")],
            ..Default::default()
        };
        let graph = proto::Graph { initializer: vec![tensor], ..Default::default() };
        proto::Model { ir_version: 8, graph: Some(graph), ..Default::default() }.encode_to_vec()
    }

    #[test]
    fn data_is_read_from_the_models_own_folder_alone() {
        let folder = std::env::temp_dir().join(format!("altiplano-onnx-{}", std::process::id()));
        let inner = folder.join("model");
        std::fs::create_dir_all(&inner).unwrap();
        let data: Vec<u8> = [0f32, 1.5, -2.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        std::fs::write(inner.join("data.bin"), &data).unwrap();
        std::fs::write(folder.join("secret.bin"), &data).unwrap();
        let file = inner.join("m.onnx");
        let read_at = |location: &str, offset: &str| {
            std::fs::write(&file, model(location, offset)).unwrap();
            read(&file)
        };
        let found = read_at("data.bin", "4").unwrap();
        assert_eq!(found["w"].to_f64(), [1.5, -2.0]);
        let secret = folder.join("secret.bin");
        for location in ["../secret.bin", secret.to_str().unwrap(), "x/../../secret.bin", "..\\secret.bin", "C:x", ""] {
            let error = read_at(location, "0").unwrap_err();
            assert!(error.to_string().contains("own folder"), "{location}: {error}");
        }
        // An offset past the end, one that is no number, and a missing file.
        assert!(read_at("data.bin", "8").unwrap_err().to_string().contains("its shape takes 8"));
        assert!(read_at("data.bin", "-1").is_err() && read_at("other.bin", "0").is_err());
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink(&secret, inner.join("link.bin")).unwrap();
            assert!(read_at("link.bin", "0").unwrap_err().to_string().contains("own folder"));
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
