//! The runtime compilers NVRTC and hiprtc: one C interface under two prefixes, found when first needed.

#![expect(unsafe_code, reason = "calls a C library found at run time")]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

use libloading::Library;

use super::sources::HEADERS;
use super::{Source, Target};
use crate::error::{Error, Result};

/// What every compiler is told: no contraction, so that `fused` in the sources is the only fused multiply-add.
pub(super) const LANGUAGE: [&str; 3] = ["-std=c++17", "-O3", "-ffp-contract=off"];

type Program = *mut c_void;
type CreateProgram =
    unsafe extern "C" fn(*mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char) -> c_int;
type CompileProgram = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type Bytes = unsafe extern "C" fn(Program, *mut c_char) -> c_int;
type DestroyProgram = unsafe extern "C" fn(*mut Program) -> c_int;
type Version = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
type ErrorString = unsafe extern "C" fn(c_int) -> *const c_char;

/// A runtime compiler.
#[derive(Debug)]
pub struct Rtc {
    nvidia: bool,
    version: String,
    create: CreateProgram,
    compile: CompileProgram,
    log_size: Size,
    log: Bytes,
    code_size: Size,
    code: Bytes,
    destroy: DestroyProgram,
    error_string: ErrorString,
    // The functions above live in it.
    _library: Library,
}

impl Rtc {
    /// Finds NVRTC: `CAPSTAN_NVRTC`, the loader's path, CUDA's usual folders, Python's `nvidia` packages.
    ///
    /// Errors: it is nowhere, or has no cubin output (before 11.1).
    pub fn nvrtc() -> Result<Rtc> {
        let names = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
        let mut folders: Vec<PathBuf> = ["/usr/local/cuda/lib64", "/opt/cuda/lib64"].map(PathBuf::from).to_vec();
        for site in python_packages() {
            folders.extend(["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"].map(|inner| site.join(inner)));
        }
        let library = open("CAPSTAN_NVRTC", &names, &folders).map_err(|error| {
            error.help("install CUDA or `pip install nvidia-cuda-nvrtc`, or name the library in CAPSTAN_NVRTC")
        })?;
        Rtc::resolve(library, "nvrtc", "CUBIN")
    }

    /// Finds hiprtc: `CAPSTAN_HIPRTC`, the loader's path, ROCm's folder.
    ///
    /// Errors: it is nowhere.
    pub fn hiprtc() -> Result<Rtc> {
        let names = ["libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so.5", "libhiprtc.so"];
        let library = open("CAPSTAN_HIPRTC", &names, &[PathBuf::from("/opt/rocm/lib")])
            .map_err(|error| error.help("install ROCm, or name the library in CAPSTAN_HIPRTC"))?;
        Rtc::resolve(library, "hiprtc", "Code")
    }

    fn resolve(library: Library, prefix: &str, code: &str) -> Result<Rtc> {
        // SAFETY: the types are those of nvrtc.h and hiprtc.h, which agree but for the prefix; the library is kept.
        let found = unsafe {
            Rtc {
                nvidia: prefix == "nvrtc",
                version: version(&library, prefix)?,
                create: symbol(&library, prefix, "CreateProgram")?,
                compile: symbol(&library, prefix, "CompileProgram")?,
                log_size: symbol(&library, prefix, "GetProgramLogSize")?,
                log: symbol(&library, prefix, "GetProgramLog")?,
                code_size: symbol(&library, prefix, &format!("Get{code}Size"))?,
                code: symbol(&library, prefix, &format!("Get{code}"))?,
                destroy: symbol(&library, prefix, "DestroyProgram")?,
                error_string: symbol(&library, prefix, "GetErrorString")?,
                _library: library,
            }
        };
        Ok(found)
    }

    /// Name and version, e.g. `nvrtc 13.0`.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Flags for a target.
    pub fn flags(&self, target: Target<'_>) -> Vec<String> {
        if self.nvidia {
            // Registers and spills go into the log.
            return vec![
                format!("--gpu-architecture={}", target.arch),
                "-std=c++17".into(),
                "--fmad=false".into(),
                "--ptxas-options=-v".into(),
            ];
        }
        std::iter::once(format!("--offload-arch={}", target.arch)).chain(LANGUAGE.map(String::from)).collect()
    }

    /// Compiles to a cubin or code object; gives it and the log.
    ///
    /// Errors: the log.
    pub fn compile(&self, source: &Source, flags: &[String]) -> Result<(Vec<u8>, String)> {
        let text =
            |text: &str| CString::new(text).map_err(|_| Error::input(format!("{}: a zero byte in the source", source.name)));
        let (code, name) = (text(source.text)?, text(source.name)?);
        let headers = HEADERS.iter().map(|(_, body)| text(body)).collect::<Result<Vec<_>>>()?;
        let names = HEADERS.iter().map(|(name, _)| text(name)).collect::<Result<Vec<_>>>()?;
        let flags = flags.iter().map(|flag| text(flag)).collect::<Result<Vec<_>>>()?;
        let pointers = |strings: &[CString]| strings.iter().map(|string| string.as_ptr()).collect::<Vec<_>>();
        let (headers, names, flags) = (pointers(&headers), pointers(&names), pointers(&flags));
        let mut program = Made { handle: std::ptr::null_mut(), destroy: self.destroy };
        // SAFETY: every string outlives the call; both arrays have the length that is given.
        let status = unsafe {
            let count = headers.len() as c_int;
            (self.create)(&mut program.handle, code.as_ptr(), name.as_ptr(), count, headers.as_ptr(), names.as_ptr())
        };
        self.check("CreateProgram", status, source)?;
        // SAFETY: the program was created; the flags outlive the call.
        let status = unsafe { (self.compile)(program.handle, flags.len() as c_int, flags.as_ptr()) };
        let log = self.bytes(&program, self.log_size, self.log, source).unwrap_or_default();
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_string();
        if status != 0 {
            return Err(Error::device(format!("{} refuses {}:\n{log}", self.version, source.name)).call(
                "CompileProgram",
                status,
                "",
            ));
        }
        Ok((self.bytes(&program, self.code_size, self.code, source)?, log))
    }

    fn bytes(&self, program: &Made, size: Size, fill: Bytes, source: &Source) -> Result<Vec<u8>> {
        let mut bytes = 0;
        // SAFETY: the program was created.
        self.check("GetSize", unsafe { size(program.handle, &mut bytes) }, source)?;
        let mut buffer = vec![0u8; bytes];
        // SAFETY: the buffer has the size that the library asked for.
        self.check("GetBytes", unsafe { fill(program.handle, buffer.as_mut_ptr().cast()) }, source)?;
        Ok(buffer)
    }

    fn check(&self, call: &'static str, status: c_int, source: &Source) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: gives a static string for any status.
        let text = unsafe { CStr::from_ptr((self.error_string)(status)) }.to_string_lossy().into_owned();
        Err(Error::device(format!("{}: {text}", self.version)).call(call, status, source.name))
    }
}

/// A program, destroyed at the end.
struct Made {
    handle: Program,
    destroy: DestroyProgram,
}

impl Drop for Made {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: created by the same library, used no more.
            unsafe { (self.destroy)(&mut self.handle) };
        }
    }
}

/// # Safety
/// `T` is the type of the function.
unsafe fn symbol<T: Copy>(library: &Library, prefix: &str, name: &str) -> Result<T> {
    let name = format!("{prefix}{name}");
    // SAFETY: the caller's word.
    unsafe { library.get::<T>(name.as_bytes()) }
        .map(|symbol| *symbol)
        .map_err(|_| Error::unavailable(format!("the library has no {name}")).help("install a newer one"))
}

/// # Safety
/// The library is the one the prefix belongs to.
unsafe fn version(library: &Library, prefix: &str) -> Result<String> {
    // SAFETY: the type is that of both headers.
    let version: Version = unsafe { symbol(library, prefix, "Version") }?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: two integers to write.
    unsafe { version(&mut major, &mut minor) };
    Ok(format!("{prefix} {major}.{minor}"))
}

/// Opens the first library there is: what `variable` names (a file, or a folder of it), else by name, else in the folders.
fn open(variable: &str, names: &[&str], folders: &[PathBuf]) -> Result<Library> {
    let given = std::env::var_os(variable).filter(|path| !path.is_empty()).map(PathBuf::from);
    let candidates: Vec<PathBuf> = match given {
        Some(path) if path.is_dir() => names.iter().map(|name| path.join(name)).collect(),
        Some(path) => vec![path],
        None => {
            let inside = folders.iter().filter(|folder| folder.is_dir());
            let inside = inside.flat_map(|folder| names.iter().map(|name| folder.join(name)).filter(|path| path.exists()));
            names.iter().map(PathBuf::from).chain(inside).collect()
        }
    };
    let mut why = String::new();
    for path in &candidates {
        // SAFETY: loading runs the library's own initialisers; it is a compiler that the user installed or named.
        match unsafe { Library::new(path) } {
            Ok(library) => return Ok(library),
            // The loader's word is the error's source.
            Err(error) => why = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string),
        }
    }
    let tried = candidates.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ");
    Err(Error::unavailable(format!("no {} ({tried}; {why})", names[names.len() - 1])))
}

/// Package folders of the Pythons of a usual machine.
fn python_packages() -> Vec<PathBuf> {
    let mut roots: Vec<PathBuf> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(std::env::var_os).map(PathBuf::from).collect();
    roots.extend(["/usr/local", "/usr"].map(PathBuf::from));
    if let Some(home) = std::env::var_os("HOME").map(PathBuf::from) {
        roots.push(home.join(".local"));
        roots.extend(entries(&home.join(".pyenv/versions")));
    }
    let mut found = Vec::new();
    for root in roots {
        for python in entries(&root.join("lib")) {
            if python.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python")) {
                found.extend(["site-packages", "dist-packages"].map(|name| python.join(name)));
            }
        }
    }
    found.retain(|path| path.is_dir());
    found
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(folder)
        .map(|all| all.filter_map(|entry| entry.ok().map(|entry| entry.path())).collect())
        .unwrap_or_default()
}
