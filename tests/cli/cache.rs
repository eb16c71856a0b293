//! The search cache: plans are the same with and without it, whatever was searched before, and even if its file is
//! damaged.

use crate::common::{DEMO, Scratch, altiplano, succeeds};
use std::path::Path;

/// The plan of a model, found with or without a cache.
fn plan(scratch: &Scratch, words: &[&str], cache: Option<&Path>) -> String {
    let file = scratch.path("plan.json").display().to_string();
    let mut arguments = vec!["plan", "-o", &file];
    arguments.extend(words);
    let folder = cache.map(|folder| folder.display().to_string());
    if let Some(folder) = &folder {
        arguments.extend(["--cache", folder]);
    }
    let report = succeeds(&arguments);
    format!("{}\n{report}", std::fs::read_to_string(&file).expect("a plan"))
}

fn kept(folder: &Path) -> Vec<u8> {
    std::fs::read(folder.join("altiplano-searches")).expect("what was kept")
}

/// A sequence of requests that share much work.
fn requests() -> Vec<Vec<&'static str>> {
    let own = |name: &str| -> &'static str {
        Box::leak(format!("{}/tests/models/{name}", env!("CARGO_MANIFEST_DIR")).into_boxed_str())
    };
    let (experts, unet) = (own("moe-sorted.mlir"), own("unet.mlir"));
    vec![
        vec![DEMO, "--cluster", "p3.16xlarge:2", "--global-batch", "256"],
        vec![DEMO, "--cluster", "p3.16xlarge:1", "--global-batch", "256"],
        vec![DEMO, "--cluster", "p3.16xlarge:2", "--global-batch", "128", "--optimizer", "sgd"],
        vec![DEMO, "--cluster", "p3.16xlarge:2", "--global-batch", "256", "--zero", "3", "--recompute", "full"],
        vec![DEMO, "--cluster", "dgx-a100:2", "--global-batch", "256"],
        vec![DEMO, "--cluster", "p3.16xlarge:2", "--global-batch", "256", "--tp", "2", "--pin", "*fc*w*=[{},{tensor}]"],
        vec![DEMO, "--cluster", "p3.16xlarge:2", "--global-batch", "256", "--loss", "none"],
        vec![experts, "--cluster", "dgx-h100:1"],
        vec![unet, "--cluster", "local:6"],
    ]
}

#[test]
fn a_search_that_remembers_finds_the_same_plans() {
    let scratch = Scratch::new();
    let folder = scratch.path("cache/searches");
    for words in requests() {
        let fresh = plan(&scratch, &words, None);
        assert_eq!(plan(&scratch, &words, Some(&folder)), fresh, "{words:?}, while it learns");
        let learned = kept(&folder);
        assert_eq!(plan(&scratch, &words, Some(&folder)), fresh, "{words:?}, as it remembers");
        assert_eq!(kept(&folder), learned, "{words:?}: there was nothing more to learn");
    }
}

#[test]
fn what_is_not_whole_is_not_read() {
    let scratch = Scratch::new();
    let folder = scratch.path("searches");
    let words = [DEMO, "--cluster", "p3.16xlarge:1", "--global-batch", "64"];
    let fresh = plan(&scratch, &words, Some(&folder));
    let good = kept(&folder);
    let cut = |to: usize| good[..to].to_vec();
    let flipped = |at: usize| {
        let mut bytes = good.clone();
        bytes[at] ^= 4;
        bytes
    };
    let (length, middle) = (good.len(), good.len() / 2);
    let spoilt = [Vec::new(), cut(7), cut(length - 1), cut(middle), flipped(20), flipped(middle), flipped(length - 1)];
    for bytes in spoilt {
        std::fs::write(folder.join("altiplano-searches"), &bytes).expect("a file");
        assert_eq!(plan(&scratch, &words, Some(&folder)), fresh);
        assert_eq!(kept(&folder), good, "what was spoilt is replaced");
    }
    let left: Vec<_> = std::fs::read_dir(&folder).expect("a folder").flatten().map(|e| e.file_name()).collect();
    assert_eq!(left, ["altiplano-searches"]);
}

#[test]
fn a_folder_that_cannot_be_is_named() {
    let scratch = Scratch::new();
    let file = scratch.file("file", "no folder");
    for folder in [file.clone(), format!("{file}/in/it")] {
        let said = altiplano(&["plan", DEMO, "--cluster", "local:2", "--cache", &folder]);
        assert_eq!(said.code, Some(2));
        assert!(said.stderr.contains(&folder) && said.stderr.lines().count() == 1, "{}", said.stderr);
    }
}

#[test]
fn a_pipe_or_an_endless_file_in_place_of_the_cache_is_not_read() {
    let scratch = Scratch::new();
    let folder = scratch.path("searches");
    std::fs::create_dir(&folder).expect("a folder");
    let file = folder.join("altiplano-searches");
    assert!(std::process::Command::new("mkfifo").arg(&file).status().expect("mkfifo runs").success());
    let named = folder.display().to_string();
    let said = altiplano(&["plan", DEMO, "--cluster", "local:2", "--cache", &named]);
    assert_eq!(said.code, Some(2), "{}", said.stderr);
    assert!(
        said.stderr.contains(&format!("{named}: its file altiplano-searches is not a regular file")),
        "{}",
        said.stderr
    );

    std::fs::remove_file(&file).expect("the pipe");
    std::fs::File::create(&file).and_then(|file| file.set_len(1 << 42)).expect("a sparse file");
    let words = [DEMO, "--cluster", "p3.16xlarge:1", "--global-batch", "64"];
    assert_eq!(plan(&scratch, &words, Some(&folder)), plan(&scratch, &words, None));
    assert!(kept(&folder).len() < 1 << 28);
}
