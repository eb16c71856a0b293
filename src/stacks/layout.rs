//! Megatron's layout strings: stages with a bar between, and in each a letter for every layer. `E` is the embedding,
//! `t` a decoder layer, `m` a layer that predicts further tokens, and `L` the loss; `*n` repeats a letter or a group.

/// Most letters that a string may stand for.
const MOST: usize = 1 << 20;

/// The layers of a layout.
#[derive(Clone, Debug, PartialEq)]
pub struct Layout {
    /// Decoder layers of each stage, in the order of the model.
    pub layers: Vec<u32>,
    /// Layers that predict further tokens.
    pub further: u32,
}

/// Reads a layout.
pub fn parse(text: &str) -> Result<Layout, String> {
    let plain: Vec<char> = text.chars().filter(|c| *c != ',' && !c.is_whitespace()).collect();
    let mut letters = Vec::new();
    let mut at = 0;
    while let Some(&c) = plain.get(at) {
        let group = match c {
            '(' => {
                let length = plain[at..].iter().position(|&c| c == ')').ok_or("has a group that does not end")?;
                let group = plain[at + 1..at + length].to_vec();
                at += length + 1;
                group
            }
            c => {
                at += 1;
                vec![c]
            }
        };
        let mut times = 1;
        if plain.get(at) == Some(&'*') {
            let digits: String = plain[at + 1..].iter().take_while(|c| c.is_ascii_digit()).collect();
            at += 1 + digits.len();
            times = digits.parse().map_err(|_| "has a * without a number")?;
        }
        let group = repeated(&group)?;
        if letters.len().saturating_add(group.len().saturating_mul(times)) > MOST {
            return Err("stands for too many layers".into());
        }
        (0..times).for_each(|_| letters.extend(&group));
    }
    let mut layout = Layout { layers: vec![0], further: 0 };
    for letter in letters {
        match letter {
            't' => *layout.layers.last_mut().ok_or("is empty")? += 1,
            '|' => layout.layers.push(0),
            'm' => layout.further += 1,
            'E' | 'L' => {}
            other => return Err(format!("has the letter {other}, and only E, t, m and L are known")),
        }
    }
    Ok(layout)
}

/// The letters of a group, in which letters may be repeated.
fn repeated(group: &[char]) -> Result<Vec<char>, String> {
    let mut letters = Vec::new();
    let mut at = 0;
    while let Some(&letter) = group.get(at) {
        at += 1;
        let mut times = 1;
        if group.get(at) == Some(&'*') {
            let digits: String = group[at + 1..].iter().take_while(|c| c.is_ascii_digit()).collect();
            at += 1 + digits.len();
            times = digits.parse().map_err(|_| "has a * without a number")?;
        }
        if letters.len().saturating_add(times) > MOST {
            return Err("stands for too many layers".into());
        }
        letters.extend(std::iter::repeat_n(letter, times));
    }
    Ok(letters)
}

/// Writes a layout: the embedding with the first stage, the loss with the last. Equal stages are written once.
pub fn print(layers: &[u32]) -> String {
    let letters = |count: u32| match count {
        0 => String::new(),
        1 => "t".to_string(),
        count => format!("t*{count}"),
    };
    let mut text = String::from("E");
    let mut at = 0;
    while at < layers.len() {
        let same = layers[at..].iter().take_while(|n| **n == layers[at]).count();
        let is_last = at + same == layers.len();
        // The last stage has no bar behind it.
        let grouped = if is_last { same - 1 } else { same };
        let stage = letters(layers[at]);
        match grouped {
            0 => {}
            1 => text += &format!("{stage}|"),
            n => text += &format!("({stage}|)*{n}"),
        }
        if is_last {
            text += &stage;
        }
        at += same;
    }
    text + "L"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_are_read() {
        let table: [(&str, &[u32], u32); 5] = [
            ("Et*2|(t*2|)*3,t*3|tL", &[2, 2, 2, 2, 3, 1], 0),
            ("Ettt|(tt|)*2,m|L", &[3, 2, 2, 0, 0], 1),
            ("Et|(tt|)*30mL", &[&[1][..], &[2; 30], &[0]].concat(), 1),
            ("E|t|L", &[0, 1, 0], 0),
            ("EttL", &[2], 0),
        ];
        for (text, layers, further) in table {
            assert_eq!(parse(text), Ok(Layout { layers: layers.to_vec(), further }), "{text}");
        }
        for (text, problem) in [
            ("Ex|L", "has the letter x, and only E, t, m and L are known"),
            ("E(t|L", "has a group that does not end"),
            ("Et*|L", "has a * without a number"),
            ("Et*9999999|L", "stands for too many layers"),
        ] {
            assert_eq!(parse(text), Err(problem.to_string()), "{text}");
        }
    }

    #[test]
    fn written_layouts_are_read_again() {
        let table: [(&[u32], &str); 5] = [
            (&[2, 2, 2, 2, 3, 1], "E(t*2|)*4t*3|tL"),
            (&[4], "Et*4L"),
            (&[0, 1, 1, 0], "E|(t|)*2L"),
            (&[3, 4, 4, 3], "Et*3|(t*4|)*2t*3L"),
            (&[2, 2], "Et*2|t*2L"),
        ];
        for (layers, text) in table {
            assert_eq!(print(layers), text);
            assert_eq!(parse(text).map(|layout| layout.layers), Ok(layers.to_vec()), "{text}");
        }
    }
}
