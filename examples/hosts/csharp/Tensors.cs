using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using System.Runtime.InteropServices;
using System.Text;

/// <summary>A tensor: its dtype by the name in manifests, its sizes, and its elements as little-endian bytes.</summary>
sealed class Tensor
{
    static readonly Dictionary<string, int> Sizes = new Dictionary<string, int>
    {
        { "float32", 4 }, { "float64", 8 }, { "float16", 2 }, { "int64", 8 }, { "int32", 4 }, { "int16", 2 },
        { "int8", 1 }, { "uint8", 1 }, { "bool", 1 },
    };

    public readonly string DType;
    public readonly long[] Shape;
    public readonly byte[] Bytes;

    public Tensor(string dtype, long[] shape, byte[] bytes)
    {
        DType = dtype;
        Shape = shape;
        Bytes = bytes;
        if (Size(dtype, shape) != bytes.Length) throw new FormatException(bytes.Length + " bytes are no " + Signature);
    }

    public static Tensor Of(float value)
    {
        return new Tensor("float32", new long[0], BitConverter.GetBytes(value));
    }

    public static Tensor Of(long[] shape, params long[] values)
    {
        return new Tensor("int64", shape, values.SelectMany(BitConverter.GetBytes).ToArray());
    }

    /// <summary>Makes a moment whose elements all have one value.</summary>
    public static Tensor Filled(string dtype, long[] shape, double value)
    {
        if (dtype != "float32" && dtype != "float64") throw new FormatException("moments of " + dtype + " are not supported");
        byte[] element = dtype == "float32" ? BitConverter.GetBytes((float)value) : BitConverter.GetBytes(value);
        var bytes = new byte[Size(dtype, shape)];
        for (int index = 0; index < bytes.Length; index++) bytes[index] = element[index % element.Length];
        return new Tensor(dtype, shape, bytes);
    }

    /// <summary>Returns the number of bytes.</summary>
    public static long Size(string dtype, long[] shape)
    {
        if (!Sizes.ContainsKey(dtype)) throw new FormatException("the dtype '" + dtype + "' is not supported");
        return shape.Aggregate((long)Sizes[dtype], (size, length) => checked(size * length));
    }

    public string Signature
    {
        get { return DType + Json.Write(Shape); }
    }

    public int Count
    {
        get { return Bytes.Length / Sizes[DType]; }
    }

    public bool IsFloat
    {
        get { return DType.StartsWith("float", StringComparison.Ordinal); }
    }

    /// <summary>Returns the element at an index of a floating-point tensor; for float16, 0, infinity or NaN.</summary>
    public double Real(int index)
    {
        if (DType == "float32") return BitConverter.ToSingle(Bytes, 4 * index);
        if (DType == "float64") return BitConverter.ToDouble(Bytes, 8 * index);
        // An exponent of ones is infinity, or NaN if another bit follows.
        int magnitude = BitConverter.ToUInt16(Bytes, 2 * index) & 0x7FFF;
        if (magnitude > 0x7C00) return double.NaN;
        return magnitude == 0x7C00 ? double.PositiveInfinity : 0;
    }

    /// <summary>True if no element of a floating-point tensor is NaN or infinite.</summary>
    public bool IsFinite
    {
        get { return Enumerable.Range(0, Count).Select(Real).All(x => !double.IsNaN(x) && !double.IsInfinity(x)); }
    }

    /// <summary>Returns the element at an index of a tensor of integers.</summary>
    public long Integer(int index)
    {
        switch (DType)
        {
            case "int64": return BitConverter.ToInt64(Bytes, 8 * index);
            case "int32": return BitConverter.ToInt32(Bytes, 4 * index);
            case "int16": return BitConverter.ToInt16(Bytes, 2 * index);
            case "int8": return (sbyte)Bytes[index];
            case "uint8": return Bytes[index];
            default: throw new FormatException("labels of " + DType + " are not supported");
        }
    }
}

/// <summary>A safetensors file: the length of the header, the header as JSON, then the tensors.</summary>
sealed class Safetensors
{
    static readonly Dictionary<string, string> DTypes = new Dictionary<string, string>
    {
        { "F32", "float32" }, { "F64", "float64" }, { "F16", "float16" }, { "I64", "int64" }, { "I32", "int32" },
        { "I16", "int16" }, { "I8", "int8" }, { "U8", "uint8" }, { "BOOL", "bool" },
    };

    public readonly Dictionary<string, string> Metadata = new Dictionary<string, string>();
    public readonly Dictionary<string, Tensor> Tensors = new Dictionary<string, Tensor>();

    /// <summary>Throws a FormatException if the file is damaged.</summary>
    public static Safetensors Read(string path)
    {
        byte[] data = File.ReadAllBytes(path);
        long length = data.Length < 8 ? -1 : BitConverter.ToInt64(data, 0);
        if (length < 2 || length > data.Length - 8) throw new FormatException("it is truncated, or no safetensors file");
        int start = 8 + (int)length;
        var file = new Safetensors();
        var places = new List<long[]>();
        string header = new UTF8Encoding(false, true).GetString(data, 8, (int)length);
        foreach (KeyValuePair<string, object> entry in Json.Object(Json.Parse(header)))
        {
            Dictionary<string, object> value = Json.Object(entry.Value);
            if (entry.Key == "__metadata__")
            {
                foreach (KeyValuePair<string, object> text in value) file.Metadata[text.Key] = Json.Text(text.Value);
                continue;
            }
            long[] offsets = Json.Sizes(Json.Get(value, "data_offsets"));
            if (offsets.Length != 2 || offsets[0] > offsets[1] || offsets[1] > data.Length - start)
                throw new FormatException("it is truncated in the tensor '" + entry.Key + "'");
            var bytes = new byte[offsets[1] - offsets[0]];
            Array.Copy(data, start + offsets[0], bytes, 0, bytes.Length);
            if (!DTypes.TryGetValue(Json.Text(Json.Get(value, "dtype")), out string dtype)) dtype = "unknown";
            file.Tensors[entry.Key] = new Tensor(dtype, Json.Sizes(Json.Get(value, "shape")), bytes);
            places.Add(offsets);
        }
        // The tensors fill the file without gaps: a damaged offset would give numbers of another tensor.
        long end = 0;
        foreach (long[] place in places.OrderBy(place => place[0]).ThenBy(place => place[1]))
        {
            if (place[0] != end) throw new FormatException("its tensors overlap or leave gaps");
            end = place[1];
        }
        if (start + end != data.Length) throw new FormatException("it is too long");
        return file;
    }

    /// <summary>Writes a new file, flushes it, renames it, and flushes the folder.</summary>
    public void Write(string path)
    {
        var header = new Dictionary<string, object> { { "__metadata__", Metadata.ToDictionary(x => x.Key, x => (object)x.Value) } };
        long end = 0;
        foreach (KeyValuePair<string, Tensor> entry in Tensors)
        {
            long begin = end;
            end += entry.Value.Bytes.Length;
            header[entry.Key] = new Dictionary<string, object>
            {
                { "dtype", DTypes.First(x => x.Value == entry.Value.DType).Key },
                { "shape", entry.Value.Shape },
                { "data_offsets", new[] { begin, end } },
            };
        }
        byte[] text = Encoding.UTF8.GetBytes(Json.Write(header));
        byte[] spaces = Enumerable.Repeat((byte)' ', (8 - text.Length % 8) % 8).ToArray();
        string target = Path.GetFullPath(path), temporary = target + ".tmp";
        try
        {
            using (var file = new FileStream(temporary, FileMode.Create, FileAccess.Write))
            {
                foreach (byte[] bytes in new[] { BitConverter.GetBytes((long)(text.Length + spaces.Length)), text, spaces })
                    file.Write(bytes, 0, bytes.Length);
                foreach (Tensor tensor in Tensors.Values) file.Write(tensor.Bytes, 0, tensor.Bytes.Length);
                // To the disk: otherwise a loss of power may leave the new name without its content.
                file.Flush(true);
            }
            // Both rename on one volume, which is atomic.
            if (File.Exists(target)) File.Replace(temporary, target, null);
            else File.Move(temporary, target);
        }
        finally
        {
            File.Delete(temporary);
        }
        if (Environment.OSVersion.Platform == PlatformID.Unix) Folder.Flush(Path.GetDirectoryName(target));
    }

    /// <summary>.NET does not flush folders; Windows writes renames to the disk itself.</summary>
    static class Folder
    {
        [DllImport("libc", EntryPoint = "open")]
        static extern int Open(byte[] path, int flags);

        [DllImport("libc", EntryPoint = "fsync")]
        static extern int Sync(int file);

        [DllImport("libc", EntryPoint = "close")]
        static extern int Close(int file);

        public static void Flush(string path)
        {
            int file = Open(Encoding.UTF8.GetBytes(path + "\0"), 0 /* O_RDONLY */);
            if (file < 0) return;
            Sync(file);
            Close(file);
        }
    }
}
