// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/crypto/x509roots/fallback/bundle"
)

// The media types of the OCI image specification.
const (
	indexType    = "application/vnd.oci.image.index.v1+json"
	manifestType = "application/vnd.oci.image.manifest.v1+json"
	configType   = "application/vnd.oci.image.config.v1+json"
	layerType    = "application/vnd.oci.image.layer.v1.tar+gzip"
)

// descriptor refers to a blob.
type descriptor struct {
	MediaType string    `json:"mediaType"`
	Digest    string    `json:"digest"`
	Size      int       `json:"size"`
	Platform  *platform `json:"platform,omitempty"`
}

type platform struct {
	Architecture string `json:"architecture"`
	OS           string `json:"os"`
}

type index struct {
	SchemaVersion int          `json:"schemaVersion"`
	MediaType     string       `json:"mediaType"`
	Manifests     []descriptor `json:"manifests"`
}

type manifest struct {
	SchemaVersion int          `json:"schemaVersion"`
	MediaType     string       `json:"mediaType"`
	Config        descriptor   `json:"config"`
	Layers        []descriptor `json:"layers"`
}

type config struct {
	platform
	Config struct {
		Entrypoint []string
	} `json:"config"`
	RootFS struct {
		Type    string   `json:"type"`
		DiffIDs []string `json:"diff_ids"`
	} `json:"rootfs"`
}

// layout is the directory of an OCI layout.
type layout string

// writeImage writes an image for several architectures into a new directory and returns
// the digest of the image. Each program is ARCHITECTURE=FILE.
func writeImage(dir, licences string, programs []string) (string, error) {
	l := layout(dir)
	if err := os.MkdirAll(filepath.Join(dir, "blobs/sha256"), 0o755); err != nil {
		return "", err
	}
	all := index{SchemaVersion: 2, MediaType: indexType}
	for _, program := range programs {
		architecture, file, ok := strings.Cut(program, "=")
		if !ok {
			return "", fmt.Errorf("%s is not ARCHITECTURE=PROGRAM", program)
		}
		d, err := l.addPlatform(platform{architecture, "linux"}, file, licences)
		if err != nil {
			return "", err
		}
		all.Manifests = append(all.Manifests, d)
	}
	d, err := l.addJSON(indexType, all)
	if err != nil {
		return "", err
	}
	top, err := json.Marshal(index{2, indexType, []descriptor{d}})
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(filepath.Join(dir, "index.json"), top, 0o644); err != nil {
		return "", err
	}
	return d.Digest, os.WriteFile(filepath.Join(dir, "oci-layout"), []byte(`{"imageLayoutVersion":"1.0.0"}`), 0o644)
}

// addPlatform adds the image for one platform and returns a descriptor of its manifest.
func (l layout) addPlatform(p platform, program, licences string) (descriptor, error) {
	text, err := layer(program, licences)
	if err != nil {
		return descriptor{}, err
	}
	var compressed bytes.Buffer
	w := gzip.NewWriter(&compressed)
	if _, err := w.Write(text); err != nil {
		return descriptor{}, err
	}
	if err := w.Close(); err != nil {
		return descriptor{}, err
	}
	layer, err := l.add(layerType, compressed.Bytes())
	if err != nil {
		return descriptor{}, err
	}
	c := config{platform: p}
	c.Config.Entrypoint = []string{"/kpng"}
	c.RootFS.Type, c.RootFS.DiffIDs = "layers", []string{digest(text)}
	configuration, err := l.addJSON(configType, c)
	if err != nil {
		return descriptor{}, err
	}
	d, err := l.addJSON(manifestType, manifest{2, manifestType, configuration, []descriptor{layer}})
	d.Platform = &p
	return d, err
}

// layer returns an archive with the program, the licences, and the certificates of public
// authorities at the path where programs look for them. Certificates that are valid only
// with further constraints are left out.
func layer(program, licences string) ([]byte, error) {
	var certificates bytes.Buffer
	for root := range bundle.Roots() {
		if root.Constraint == nil {
			if err := pem.Encode(&certificates, &pem.Block{Type: "CERTIFICATE", Bytes: root.Certificate}); err != nil {
				return nil, err
			}
		}
	}
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	// Without a time of change, an entry has that of the epoch.
	for _, dir := range []string{"etc/", "etc/ssl/", "etc/ssl/certs/", "licenses/"} {
		if err := w.WriteHeader(&tar.Header{Name: dir, Mode: 0o755, Typeflag: tar.TypeDir}); err != nil {
			return nil, err
		}
	}
	add := func(name string, mode int64, content []byte) error {
		if err := w.WriteHeader(&tar.Header{Name: name, Mode: mode, Size: int64(len(content)), Typeflag: tar.TypeReg}); err != nil {
			return err
		}
		_, err := w.Write(content)
		return err
	}
	if err := add("etc/ssl/certs/ca-certificates.crt", 0o644, certificates.Bytes()); err != nil {
		return nil, err
	}
	files, err := os.ReadDir(licences)
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		if err := addFile(add, "licenses/"+file.Name(), 0o644, filepath.Join(licences, file.Name())); err != nil {
			return nil, err
		}
	}
	if err := addFile(add, "kpng", 0o755, program); err != nil {
		return nil, err
	}
	err = w.Close()
	return archive.Bytes(), err
}

func addFile(add func(string, int64, []byte) error, name string, mode int64, file string) error {
	content, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	return add(name, mode, content)
}

func (l layout) addJSON(mediaType string, of any) (descriptor, error) {
	text, err := json.Marshal(of)
	if err != nil {
		return descriptor{}, err
	}
	return l.add(mediaType, text)
}

// add adds a blob.
func (l layout) add(mediaType string, content []byte) (descriptor, error) {
	d := digest(content)
	file := filepath.Join(string(l), "blobs", strings.Replace(d, ":", "/", 1))
	return descriptor{MediaType: mediaType, Digest: d, Size: len(content)}, os.WriteFile(file, content, 0o644)
}

func digest(of []byte) string {
	sum := sha256.Sum256(of)
	return "sha256:" + hex.EncodeToString(sum[:])
}
