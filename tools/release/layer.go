// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"encoding/pem"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"

	"golang.org/x/crypto/x509roots/fallback/bundle"
)

// layer is an archive with files. Each entry belongs to root and has the time of the
// epoch.
type layer struct {
	content *bytes.Buffer
	tar     *tar.Writer
	dirs    map[string]bool
}

func newLayer() *layer {
	content := &bytes.Buffer{}
	return &layer{content, tar.NewWriter(content), map[string]bool{}}
}

// close returns the archive.
func (l *layer) close() ([]byte, error) {
	err := l.tar.Close()
	return l.content.Bytes(), err
}

// add adds a file, and the directories above it that the layer does not have yet.
func (l *layer) add(name string, mode int64, content []byte) error {
	if err := l.header(&tar.Header{Name: name, Mode: mode, Size: int64(len(content)), Typeflag: tar.TypeReg}); err != nil {
		return err
	}
	_, err := l.tar.Write(content)
	return err
}

func (l *layer) header(h *tar.Header) error {
	if dir := path.Dir(h.Name); dir != "." && !l.dirs[dir] {
		l.dirs[dir] = true
		if err := l.header(&tar.Header{Name: dir, Mode: 0o755, Typeflag: tar.TypeDir}); err != nil {
			return err
		}
	}
	if h.Typeflag == tar.TypeDir {
		h.Name += "/"
	}
	return l.tar.WriteHeader(h)
}

func (l *layer) addFile(name string, mode int64, file string) error {
	content, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	return l.add(name, mode, content)
}

// addLicences adds the files of a directory to a directory of the layer.
func (l *layer) addLicences(to, directory string) error {
	files, err := os.ReadDir(directory)
	if err != nil {
		return err
	}
	for _, file := range files {
		if err := l.addFile(to+"/"+file.Name(), 0o644, filepath.Join(directory, file.Name())); err != nil {
			return err
		}
	}
	return nil
}

// linuxLayer returns an archive with the program, the licences, and the certificates of
// public authorities at the path where programs look for them. Certificates that are valid
// only with further constraints are left out.
func linuxLayer(program, licences string) ([]byte, error) {
	var certificates bytes.Buffer
	for root := range bundle.Roots() {
		if root.Constraint == nil {
			if err := pem.Encode(&certificates, &pem.Block{Type: "CERTIFICATE", Bytes: root.Certificate}); err != nil {
				return nil, err
			}
		}
	}
	l := newLayer()
	if err := l.add("etc/ssl/certs/ca-certificates.crt", 0o644, certificates.Bytes()); err != nil {
		return nil, err
	}
	if err := l.addLicences("licenses", licences); err != nil {
		return nil, err
	}
	if err := l.addFile("kpng", 0o755, program); err != nil {
		return nil, err
	}
	return l.close()
}

// windowsLayer returns an archive with the program and the licences for an image of
// hostProcess containers, which see the file system of the node. Windows accepts the
// lowest layer of an image only if the layer has these registry files. They need no
// content.
func windowsLayer(program, licences string) ([]byte, error) {
	l := newLayer()
	for _, name := range []string{"DEFAULT", "SAM", "SECURITY", "SOFTWARE", "SYSTEM"} {
		if err := l.add("Files/Windows/System32/config/"+name, 0o644, emptyHive()); err != nil {
			return nil, err
		}
	}
	if err := l.addLicences("Files/licenses", licences); err != nil {
		return nil, err
	}
	if err := l.addFile("Files/kpng/kpng.exe", 0o755, program); err != nil {
		return nil, err
	}
	return l.close()
}

// directoryLayer returns an archive with all files, symbolic links and directories of a
// directory.
func directoryLayer(directory string) ([]byte, error) {
	l := newLayer()
	err := fs.WalkDir(os.DirFS(directory), ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		file := filepath.Join(directory, name)
		info, err := entry.Info()
		if err != nil {
			return err
		}
		switch {
		case info.Mode()&fs.ModeSymlink != 0:
			to, err := os.Readlink(file)
			if err != nil {
				return err
			}
			return l.header(&tar.Header{Name: name, Linkname: to, Mode: 0o777, Typeflag: tar.TypeSymlink})
		case info.Mode().IsRegular():
			return l.addFile(name, int64(info.Mode().Perm()), file)
		}
		return fmt.Errorf("%s is neither a file nor a symbolic link", file)
	})
	if err != nil {
		return nil, err
	}
	return l.close()
}
