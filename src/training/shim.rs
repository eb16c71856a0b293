use altiplano_ir::graph::*; use altiplano_ir::dtype::DType; use altiplano_ir::types::TensorType;
use altiplano_runtime::{HostTensor,HostData,RuntimeError};
use std::collections::BTreeMap; use std::path::Path;
pub fn read_npy(_f:&Path)->Result<HostTensor,RuntimeError>{unimplemented!()}
pub fn read_safetensors(f:&Path)->Result<BTreeMap<String,HostTensor>,RuntimeError>{
    let b=std::fs::read(f).map_err(|error|RuntimeError::Io{file:f.into(),error})?;
    let n=u64::from_le_bytes(b[..8].try_into().unwrap()) as usize;
    let h:serde_json::Value=serde_json::from_slice(&b[8..8+n]).unwrap();
    Ok(h.as_object().unwrap().iter().filter(|(k,_)|*k!="__metadata__").map(|(k,v)|{
        let d=DType::parse(&v["dtype"].as_str().unwrap().to_lowercase()).unwrap();
        let s:Vec<u64>=v["shape"].as_array().unwrap().iter().map(|x|x.as_u64().unwrap()).collect();
        let o:Vec<usize>=v["data_offsets"].as_array().unwrap().iter().map(|x|x.as_u64().unwrap() as usize).collect();
        let ty=TensorType::new(d,s);
        (k.clone(),HostTensor{data:HostData::from_bytes(altiplano_runtime::element::Class::of(d),&b[8+n+o[0]..8+n+o[1]]),ty})}).collect())
}
pub fn initial(g:&Graph,v:ValueId,seed:u64)->HostTensor{
    let ty=g.ty(v).clone(); let n=ty.elements() as usize; let mut s=seed^(v.0 as u64*7919+13);
    let gain = ty.rank()==1 && matches!(&g.node(v).op, altiplano_ir::op::Op::Parameter(p) if p.name.ends_with("['g']"));
    let bias = ty.rank()==1 && !gain;
    let d:Vec<f64>=(0..n).map(|_|{ if gain {return 1.0} if bias {return 0.0} let mut t=0.0; for _ in 0..4{ s=s.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407); t+= (s>>33) as f64/ (1u64<<31) as f64 -0.5;} t*0.034}).collect();
    HostTensor::from_f64(ty,&d)
}
